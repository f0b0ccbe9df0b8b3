"""The successor of a job: a second one, queued at once, that continues the run if the first ended early.

A job of a site whose compute nodes have no scontrol cannot requeue itself. So `submit` queues two: the second has
the same name and `--dependency=singleton`, so Slurm starts it when the first is over. It finds in the run's
directory whether there is anything left to do: a run that completed, failed for good, was cancelled or submitted
again needs no successor, and it ends at once with exit code 0. The job in which the run comes to its end cancels
its successor if compute nodes have scancel. One successor for each submission: it has none itself.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping

from zslurm.config.spec import RunSpec
from zslurm.core.errors import NotFound, ZslurmError
from zslurm.run.run_dir import RunDir
from zslurm.run.state.run_state import is_settled, last_job
from zslurm.run.state.state_events import read_state_events
from zslurm.slurm.client import SlurmClient

SUCCESSOR_OF = "ZSLURM_SUCCESSOR_OF"
"""The variable that names the job whose successor this job is."""


def successor_spec(spec: RunSpec, job_id: str) -> RunSpec:
    """Return the run as the successor of a job is submitted: it waits for every job of its name to be over."""
    slurm, cluster = spec.slurm, spec.cluster
    flags = {**slurm.flags, "dependency": "singleton"}
    env = {**cluster.env, SUCCESSOR_OF: job_id}
    return spec.model_copy(
        update={
            "slurm": slurm.model_copy(update={"flags": flags}),
            "cluster": cluster.model_copy(update={"env": env}),
        }
    )


def why_not_needed(run: RunDir, environ: Mapping[str, str]) -> str | None:
    """Return why this job has nothing to continue; None if it has, and in every job that is no successor."""
    predecessor = environ.get(SUCCESSOR_OF)
    job = last_job(run)
    if predecessor is None or job is None:
        return None
    if job.job_id != predecessor:
        return f"the run was submitted again, as job {job.job_id}"
    if job.cancelled:
        return "the run was cancelled"
    if is_settled(job, read_state_events(run.events).events):
        return f"the run came to its end in job {job.job_id}"
    return None


def cancel_successor(client: SlurmClient, job_id: str) -> None:
    """Take a successor out of the queue; one that is gone is fine.

    Raises:
        SlurmUnavailable, SlurmRefused: from Slurm.
    """
    with contextlib.suppress(NotFound):
        client.cancel(job_id)


def dismiss_successor(run: RunDir, job_id: str) -> None:
    """Cancel the successor from inside the job in which the run came to its end.

    If this node has no scancel, the successor finds by itself that it has nothing to do.
    """
    job = last_job(run)
    if job is not None and job.job_id == job_id:
        cancel_last_successor(run)


def cancel_last_successor(run: RunDir) -> None:
    """Take the successor of the last submission out of the queue, if there is one; it would find nothing to do."""
    job = last_job(run)
    if job is not None and job.successor is not None:
        with contextlib.suppress(ZslurmError):
            cancel_successor(SlurmClient(), job.successor)
