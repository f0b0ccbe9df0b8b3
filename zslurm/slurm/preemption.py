"""Whether Slurm preempts a job, and what becomes of it: PreemptTime, which squeue shows since 20.11.

At the start of a grace time Slurm sends SIGCONT and SIGTERM to the job's steps, and nothing to the batch script;
the job stays RUNNING, and its end time moves to the end of the grace time. Nothing else distinguishes this from
`scancel --signal=TERM`. At the end of the grace time (at once if there is none) Slurm requeues or cancels the
job by its PreemptMode, with SIGCONT and SIGTERM to all its processes; PreemptTime stays until the job has left its
nodes. A job that waits in the queue again has none. All seen with Slurm 22.05.
"""

from __future__ import annotations

from dataclasses import dataclass

from zslurm.slurm.client import PreemptMode, SlurmClient
from zslurm.slurm.jobs import JobRecord


@dataclass(frozen=True)
class Preemption:
    """That Slurm preempts a job.

    Attributes:
        time: when it began, UNIX seconds.
        mode: what Slurm does, or did, with the job: put it back into the queue, or end it for good.
        done: it has done so. Otherwise the grace time runs.
        ends_at: when the grace time is over, UNIX seconds.
    """

    time: float
    mode: PreemptMode
    done: bool
    ends_at: float | None = None

    @property
    def requeued(self) -> bool:
        """Slurm has put the job back into the queue."""
        return self.done and self.mode == "requeue"


def find_preemption(client: SlurmClient, job_id: str, restart: int) -> Preemption | None:
    """Ask Slurm; None if it does not preempt this start of the job, which began after `restart` requeues.

    Raises:
        SlurmUnavailable, SlurmRefused: from Slurm.
    """
    began = client.preempted_at(job_id)
    record = client.queue([job_id]).get(job_id) if began is not None else None
    if began is None or record is None:
        return None
    if not record.state.is_over and record.restarts <= restart and _runs(record):
        ends_at = record.end_time.timestamp() if record.end_time is not None else None
        return Preemption(began.timestamp(), client.preempt_mode(record), done=False, ends_at=ends_at)
    requeued = record.restarts > restart or record.state.is_waiting
    return Preemption(began.timestamp(), "requeue" if requeued else "cancel", done=True)


def _runs(record: JobRecord) -> bool:
    """Return whether the job is not on its way out of its nodes."""
    return record.state.is_on_nodes and record.state.name not in ("COMPLETING", "STAGE_OUT")
