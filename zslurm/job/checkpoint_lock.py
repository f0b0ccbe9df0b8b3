"""The lock on a run's checkpoints: one whose job Slurm reports as over is removed before an attempt starts.

The trainer holds it (checkpoint_tools/lock.py) and knows its own node and its own job. Whether the job of
another node is still there, Slurm says. Where it cannot be asked, the lock stays, and the trainer refuses with
its holder's name.
"""

from __future__ import annotations

from pathlib import Path

from zslurm.checkpoint_tools import CheckpointError, Holder, acquire, holder_of
from zslurm.core.errors import ZslurmError
from zslurm.slurm.client import SlurmClient


def free_from_dead_job(checkpoints: Path, job_id: str, client: SlurmClient) -> Holder | None:
    """Remove the lock of a job that Slurm calls over, or does not know; returns whose it was, if it was so.

    Args:
        checkpoints: the run's directory of checkpoints.
        job_id: the job that is about to train.
        client: asks Slurm.
    """
    try:
        holder = holder_of(checkpoints)
        if holder is None or not holder.job or holder.job == job_id or not _is_over(holder.job, client):
            return None
        acquire(checkpoints, job=job_id, is_gone=lambda found: found == holder).release()
    except CheckpointError:  # the trainer meets it too, and says so
        return None
    return holder


def _is_over(job_id: str, client: SlurmClient) -> bool:
    try:
        job = client.job(job_id)
    except ZslurmError:
        return False
    return job is None or job.state.is_over
