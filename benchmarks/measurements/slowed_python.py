"""A stand-in for the Python of a benchmark's ranks: one of them takes longer for each exchange of messages.

`zslurm bench` starts it instead of Python where ZSLURM_BENCH_PYTHON names it. The rank in ZSLURM_SLOW_RANK has
the rate in ZSLURM_SLOW_RATE of the others': 0.8 is 20 % slower.
"""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path
from typing import Any

VARIABLES = RANK, RATE = "ZSLURM_SLOW_RANK", "ZSLURM_SLOW_RATE"


def slow_down(rate: float) -> None:
    """Make every exchange of this process take 1 / rate times as long."""
    import torch.distributed as dist

    exchange = dist.batch_isend_irecv

    class Late:
        def __init__(self, work: Any, began: float) -> None:
            self._work, self._began = work, began

        def wait(self) -> None:
            self._work.wait()
            end = self._began + (time.perf_counter() - self._began) / rate
            while time.perf_counter() < end:
                pass

    def slower(operations: list[Any]) -> list[Any]:
        began = time.perf_counter()
        *others, last = exchange(operations)
        return [*others, Late(last, began)]

    dist.batch_isend_irecv = slower


def main() -> None:
    """Become the rank that `-m zslurm.bench.run.rank` asks for."""
    sys.path[:] = [path for path in sys.path if Path(path or ".").resolve() != Path(__file__).resolve().parent]
    if os.environ["RANK"] == os.environ[RANK]:
        slow_down(float(os.environ[RATE]))
    from zslurm.bench.run.rank import main as rank

    sys.exit(rank())


if __name__ == "__main__":
    main()
