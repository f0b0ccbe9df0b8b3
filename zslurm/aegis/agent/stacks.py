"""Makes the ranks of this node write the stacks of all their threads to their logs, before anything is killed.

The signal would end a process that does not expect it. So each rank is asked only if its pid still is that very
rank's (by its environment, not only by the record), and if it has a handler for the signal.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from zslurm.aegis.agent.orphans import carries_mark
from zslurm.aegis.agent.sensor import NodeContext
from zslurm.aegis.agent.sensors.progress import records
from zslurm.hardware.sysfs import key_values
from zslurm.run.run_dir import AttemptDir
from zslurm.train.progress import STACK_SIGNAL, Progress


@dataclass(frozen=True)
class Dumped:
    """Which ranks were asked for their stacks, and why others were not."""

    ranks: tuple[int, ...]
    missed: Mapping[int, str]


def dump_stacks(context: NodeContext, attempt: AttemptDir) -> Dumped:
    """Send STACK_SIGNAL to every rank of the attempt on this node.

    Raises:
        OSError: the ranks' records cannot be read.
    """
    asked, missed = [], {}
    for record in records(attempt.progress(context.environ)):
        why = _blocking_reason(record, context, attempt)
        if why is None:
            asked.append(record.rank)
        else:
            missed[record.rank] = why
    return Dumped(tuple(asked), missed)


def _blocking_reason(record: Progress, context: NodeContext, attempt: AttemptDir) -> str | None:
    """Ask one rank; None if that was possible."""
    if record.attempt != attempt.number or not carries_mark(record.pid, attempt, context.environ):
        return f"process {record.pid} is gone"
    if not _handles(record.pid):
        return f"process {record.pid} does not listen yet"
    try:
        os.kill(record.pid, STACK_SIGNAL)
    except OSError as error:
        return f"process {record.pid}: {error.strerror}"
    return None


def _handles(pid: int) -> bool:
    """Return whether a process has a handler for STACK_SIGNAL: SigCgt is a mask whose lowest bit is signal 1."""
    try:
        caught = int(key_values(Path("/proc") / str(pid) / "status").get("SigCgt", ""), 16)
    except ValueError:
        return False
    return bool(caught >> (STACK_SIGNAL - 1) & 1)
