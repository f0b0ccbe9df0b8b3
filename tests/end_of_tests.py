"""End what pytest, or a benchmark, has started when it ends, also by SIGKILL: local runs and daemons detach.

python tests/end_of_tests.py PID MARK    waits for the process to end, kills whatever has MARK, which is
                                         NAME=VALUE, in its environment, and dismantles the Slurm clusters of
                                         dead processes, whose daemons have environments of their own
"""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
import time
from pathlib import Path

_ROOT = Path(__file__).parents[1]
_DISMANTLE = """
from tests.on_slurm.cluster.slurm_cluster import dismantle
dismantle(lambda instance: instance.abandoned)
"""

VARIABLE = "TESTS_OF_ZSLURM"
"""Not one of zslurm's own: tests take those out of the environment."""


def end_with(pid: int) -> subprocess.Popen[bytes]:
    """Let everything that this process starts from now on end with a process; returns what sees to it."""
    os.environ[VARIABLE] = f"{pid}-{time.time_ns()}"
    return subprocess.Popen(
        [sys.executable, "-I", "-S", __file__, str(pid), f"{VARIABLE}={os.environ[VARIABLE]}"],
        env={},
        stdin=subprocess.DEVNULL,
        start_new_session=True,
    )


def whose() -> int:
    """The process id of the pytest with which all ends that this process starts."""
    return int(os.environ[VARIABLE].partition("-")[0])


def main(pid: int, mark: str) -> None:
    """Wait for the process to end, and kill until nothing is left, clusters included."""
    try:
        ends = os.pidfd_open(pid)
    except ProcessLookupError:
        pass
    else:
        poll = select.poll()
        poll.register(ends, select.POLLIN)
        poll.poll()
    while left := marked(mark):
        for each in left:
            try:
                os.kill(each, signal.SIGKILL)
            except OSError:  # it is gone, or another user's
                continue
        time.sleep(0.1)
    if any(Path("/tmp").glob("zslurm-cluster-*")):  # as tests/on_slurm/cluster/layout.py has it
        subprocess.run([sys.executable, "-c", _DISMANTLE], cwd=_ROOT, stdin=subprocess.DEVNULL, check=False)


def marked(mark: str) -> list[int]:
    """The processes that have the mark, and a memory still: zombies have none."""
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        try:
            if f"\0{mark}\0".encode() in b"\0" + (process / "environ").read_bytes():
                found.append(int(process.name))
        except OSError:
            continue
    return found


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2])
