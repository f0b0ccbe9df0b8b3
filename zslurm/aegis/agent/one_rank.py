"""Kills one rank of this node that hangs, and no other one: the others continue, and another process replaces it.

A process inside a call that cannot be interrupted, as one of a device driver, does not die of SIGKILL. Then
nothing is gained, and the supervisor is given the reason: it restarts the ranks.
"""

from __future__ import annotations

import os
import signal
import time
from dataclasses import dataclass

import psutil

from zslurm.aegis.agent.orphans import carries_mark
from zslurm.aegis.agent.sensor import NodeContext
from zslurm.aegis.agent.sensors.progress import records
from zslurm.run.run_dir import AttemptDir

_DIES_S = 3.0
_POLL_S = 0.02


@dataclass(frozen=True)
class KilledRank:
    """What came of it.

    Attributes:
        pid: the rank's process; 0 if none was found.
        why: why it is not ended; empty if it is.
    """

    pid: int
    why: str = ""


def end_rank(context: NodeContext, attempt: AttemptDir, rank: int) -> KilledRank:
    """Kill a rank of the attempt on this node, and wait until it is gone.

    Raises:
        OSError: the ranks' records cannot be read.
    """
    own_records = [record for record in records(attempt.progress(context.environ)) if record.rank == rank]
    if not own_records or own_records[-1].attempt != attempt.number:
        return KilledRank(0, f"rank {rank} has no record on {context.node}")
    pid = own_records[-1].pid
    if not carries_mark(pid, attempt, context.environ):
        return KilledRank(pid, f"process {pid} of rank {rank} is gone")
    if _state(pid) == psutil.STATUS_DISK_SLEEP:
        return KilledRank(pid, f"process {pid} of rank {rank} is inside a call that nothing can interrupt")
    try:
        os.kill(pid, signal.SIGKILL)
    except OSError as error:
        return KilledRank(pid, f"process {pid} of rank {rank}: {error.strerror}")
    deadline = time.monotonic() + _DIES_S
    while _state(pid) not in (None, psutil.STATUS_ZOMBIE, psutil.STATUS_DEAD):
        if time.monotonic() > deadline:
            why = f"process {pid} of rank {rank} did not die within {_DIES_S:g} s: it is inside a device call"
            return KilledRank(pid, why)
        time.sleep(_POLL_S)
    return KilledRank(pid)


def _state(pid: int) -> str | None:
    """Return the state of a process; None if there is none."""
    try:
        return str(psutil.Process(pid).status())
    except psutil.NoSuchProcess:
        return None
