"""A stand-in for the Python of a benchmark's ranks: the rank in ZSLURM_SLOW_RANK has 0.8 of the others' rate.

`zslurm bench` starts it instead of Python if ZSLURM_BENCH_PYTHON names it. ZSLURM_SLOW_WAY says what is slow:

    link    what each rank sends goes through a link of LINK_BYTES_S, what the slow rank sends through one of 0.8
            of it, as a NIC or an xGMI link that came up at a lower rate. The kernel paces the sockets between the
            ranks (SO_MAX_PACING_RATE, socket(7)), so sending costs the processor what it costs without
    host    the slow rank needs 1 / 0.8 of the processor time for each exchange, as with a processor that is
            throttled: after each it computes for a quarter of the processor time that the exchange took
"""

from __future__ import annotations

import os
import socket
import sys
import time
from pathlib import Path
from typing import Any

VARIABLES = RANK, WAY = "ZSLURM_SLOW_RANK", "ZSLURM_SLOW_WAY"
WAYS = ("host", "link")
RATE = 0.8
LINK_BYTES_S = 100_000_000

_SO_MAX_PACING_RATE = 47  # socket(7); Python has no name for it


def pace_links(bytes_s: float) -> None:
    """Let what this process sends to others go at this rate, from its next exchange on."""
    import torch.distributed as dist

    exchange, known = dist.batch_isend_irecv, set[Path]()

    def paced(operations: list[Any]) -> Any:
        opened = set(Path("/proc/self/fd").iterdir())
        for each in opened - known:
            _pace(each, int(bytes_s))
        known.update(opened)
        return exchange(operations)

    vars(dist)["batch_isend_irecv"] = paced


def _pace(descriptor: Path, bytes_s: int) -> None:
    try:
        if str(descriptor.readlink()).startswith("socket:"):
            with socket.socket(fileno=os.dup(int(descriptor.name))) as each:
                if each.family in (socket.AF_INET, socket.AF_INET6):
                    each.setsockopt(socket.SOL_SOCKET, _SO_MAX_PACING_RATE, bytes_s)
    except OSError:  # closed since it was listed
        pass


def slow_down(rate: float) -> None:
    """Make every exchange of this process take 1 / rate of its processor time."""
    import torch.distributed as dist

    exchange = dist.batch_isend_irecv

    class Late:
        def __init__(self, work: Any, began: float) -> None:
            self._work, self._began = work, began

        def wait(self) -> None:
            self._work.wait()
            took = time.process_time() - self._began
            end = time.thread_time() + took * (1 / rate - 1)  # this thread's: gloo's may work as well
            while time.thread_time() < end:
                pass

    def slower(operations: list[Any]) -> list[Any]:
        began = time.process_time()
        *others, last = exchange(operations)
        return [*others, Late(last, began)]

    vars(dist)["batch_isend_irecv"] = slower


def main() -> None:
    """Become the rank that `-m zslurm.bench.run.rank` asks for."""
    sys.path[:] = [path for path in sys.path if Path(path or ".").resolve() != Path(__file__).resolve().parent]
    is_slow = os.environ["RANK"] == os.environ[RANK]
    if os.environ[WAY] == "link":
        pace_links(LINK_BYTES_S * (RATE if is_slow else 1.0))
    elif is_slow:
        slow_down(RATE)
    from zslurm.bench.run.rank import main as rank

    sys.exit(rank())


if __name__ == "__main__":
    main()
