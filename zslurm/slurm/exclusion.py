"""Start a job again elsewhere: requeue it with nodes added to those that it must not use."""

from __future__ import annotations

from collections.abc import Iterable

from zslurm.slurm.client import SlurmClient
from zslurm.slurm.hostlist import compress, expand


def requeue_excluding(client: SlurmClient, job_id: str, nodes: Iterable[str]) -> str:
    """Requeue a job without these nodes and those that it excludes already; returns all of them, as a hostlist.

    The job is held meanwhile: a plain requeue could start it before its list is changed. It is released in any
    case. Called from inside the job, this is a race: with the requeue Slurm sends SIGTERM to every process of the
    job, this one and its scontrol included, and SIGKILL after KillWait (30 s where the site did not change it). So
    the caller ignores SIGTERM first, which its children inherit.

    Raises:
        NotFound: Slurm does not know the job.
        SlurmUnavailable, SlurmRefused: from Slurm.
    """
    union = compress([*expand(client.excluded_nodes(job_id)), *nodes])
    client.requeue_hold(job_id)
    try:
        client.update(job_id, ExcNodeList=union)
    finally:
        client.release(job_id)
    return union
