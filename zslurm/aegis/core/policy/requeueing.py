"""What a try to requeue the job is to do next, by what Slurm answers; it is tried until it is known to be done."""

from __future__ import annotations

from typing import Literal

from zslurm.slurm.jobs import JobRecord
from zslurm.slurm.states import JobState

RequeueStep = Literal["nothing", "requeue", "set exclusions"]


def next_requeue_step(
    record: JobRecord | None, restart: int, *, has_left: bool, asked: bool, changes: bool, cancelled: bool
) -> RequeueStep:
    """Return what to do about a job that is to be requeued.

    Args:
        record: of the job; None if Slurm does not know it any more.
        restart: how often it had been requeued before this start.
        has_left: it is back in the queue, or on its way: it was requeued from here, or by Slurm itself.
        asked: this process has asked for the requeue, and Slurm may have done it.
        changes: the job is to exclude other nodes, or to ask for another number of them.
        cancelled: the run is to end: a job that was cancelled must not come back.
    """
    if record is None or record.state.is_over:
        return "nothing"
    if has_left:
        return "set exclusions" if changes or asked else "nothing"
    completes = record.state is JobState.COMPLETING  # and was not requeued: that would bring it back
    if completes or record.restarts > restart or cancelled:
        return "nothing"
    return "requeue"
