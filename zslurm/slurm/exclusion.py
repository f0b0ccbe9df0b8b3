"""Start a job again elsewhere: requeue it with nodes added to those that it must not use."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass

from zslurm.core.errors import SlurmRefused, SlurmUnavailable, ZslurmError
from zslurm.slurm.client import SlurmClient
from zslurm.slurm.hostlist import compress, expand
from zslurm.slurm.jobs import JobRecord
from zslurm.slurm.states import JobState


@dataclass(frozen=True)
class Size:
    """The nodes that a job asks for, its tasks on each, and the CPUs of each task."""

    nodes: int
    tasks_per_node: int
    cpus_per_task: int

    def settings(self) -> dict[str, str]:
        """By scontrol's names. With the CPUs: they stay as they were, and fewer nodes do not have so many."""
        tasks = self.nodes * self.tasks_per_node
        cpus = tasks * self.cpus_per_task
        return {"NumNodes": str(self.nodes), "NumTasks": str(tasks), "NumCPUs": str(cpus)}


def has_left(job: JobRecord | None) -> bool:
    """Whether a job that ran is back in the queue, or on its way. One that is being cancelled looks so too."""
    return job is not None and (job.state.is_waiting or job.state is JobState.COMPLETING)


def requeue_unchanged(client: SlurmClient, job_id: str) -> None:
    """Requeue a job with the settings that it has. One that was requeued already, unseen, is fine.

    Raises:
        NotFound: Slurm does not know the job.
        SlurmUnavailable: it may have been done; call it again.
        SlurmRefused: from Slurm.
    """
    try:
        client.requeue(job_id)
    except (SlurmRefused, SlurmUnavailable):
        if not has_left(client.queue([job_id]).get(job_id)):
            raise


def requeue_excluding(
    client: SlurmClient,
    job_id: str,
    nodes: Iterable[str],
    *,
    expired: Collection[str] = (),
    size: Size | None = None,
) -> str:
    """Requeue a job without these nodes and those that it excludes already; returns all of them, as a hostlist.

    The job is held meanwhile: a plain requeue could start it before its list is changed. It is released in any
    case. Called from inside the job, this is a race: with the requeue Slurm sends SIGTERM to every process of the
    job, this one and its scontrol included, and SIGKILL after KillWait (30 s where the site did not change it). So
    the caller ignores SIGTERM first, which its children inherit. Where the job was requeued already, by Slurm
    itself or unseen because Slurm did not answer, only its settings are changed.

    It may use the nodes in `expired` again. With `size` it asks for that much from now on, instead of as much as
    before: a job that fills its partition, and excludes a node of it, would wait for ever.

    Raises:
        NotFound: Slurm does not know the job.
        SlurmUnavailable: the job may be requeued, and held; call it again.
        SlurmRefused: from Slurm.
    """
    union, changes = _changes(client, job_id, nodes, expired, size)
    held = True
    try:
        client.requeue_hold(job_id)
    except (SlurmRefused, SlurmUnavailable) as error:
        if not has_left(client.queue([job_id]).get(job_id)):
            raise
        held = isinstance(error, SlurmUnavailable)
    _change(client, job_id, changes, held=held)
    return union


def exclude_requeued(
    client: SlurmClient,
    job_id: str,
    nodes: Iterable[str],
    *,
    expired: Collection[str] = (),
    size: Size | None = None,
    held: bool = False,
) -> str:
    """As `requeue_excluding`, for a job that `has_left` already: only its settings are changed.

    Where it is `held` already that is not done again: once this job was requeued, each call may be the last.
    """
    union, changes = _changes(client, job_id, nodes, expired, size)
    _change(client, job_id, changes, held=held)
    return union


def _changes(
    client: SlurmClient, job_id: str, nodes: Iterable[str], expired: Collection[str], size: Size | None
) -> tuple[str, dict[str, str]]:
    """The nodes that the job is to exclude, and all that changes."""
    already = [node for node in expand(client.excluded_nodes(job_id)) if node not in expired]
    union = compress([*already, *nodes])
    return union, {"ExcNodeList": union} | (size.settings() if size is not None else {})


def _change(client: SlurmClient, job_id: str, changes: Mapping[str, str], *, held: bool) -> None:
    """Change a job, and release it in any case."""
    try:
        if not held:
            client.hold(job_id)
        client.update(job_id, **changes)
    finally:
        client.release(job_id)


_LOOK_S = 2.0
_SLURMD_TIMEOUT_S = 300.0
_NOTICES_S = 60.0


def wait_until_down(
    client: SlurmClient,
    nodes: Collection[str],
    *,
    dead_s: Mapping[str, float] | None = None,
    given_up: Callable[[], bool] = lambda: False,
    sleep: Callable[[float], None] = time.sleep,
) -> set[str]:
    """Wait until Slurm itself calls dead nodes down: SlurmdTimeout after their last message, up to a minute more.

    A job that is requeued before that keeps a part of its books on the dead node, and starts again without its
    GPUs: `JOB_GRES=(null)`, and every srun in it fails with "Invalid generic resource (gres) specification" (seen
    with Slurm 22.05).

    `dead_s` are the seconds for which a node has been dead already: one that Slurm did not call down in all that
    time it never will, or it has come back since. Waiting ends where `given_up` returns True.

    Returns:
        Those that are down. They need not be excluded: Slurm starts nothing there. And they cannot be: a job that
        lost a node is changed only once it has left the others too ("the DB index is being set").
    """
    down: set[str] = set()
    waited, patience_s = 0.0, _SLURMD_TIMEOUT_S + _NOTICES_S
    if nodes:
        with contextlib.suppress(ZslurmError):
            timeout = client.scontrol_config().get("SlurmdTimeout", "").partition(" ")[0]
            patience_s = (float(timeout) if timeout.isdigit() else _SLURMD_TIMEOUT_S) + _NOTICES_S
    dead_s = dead_s or {}
    while nodes:
        with contextlib.suppress(ZslurmError):
            down = {node.name for node in client.nodes() if node.state == "down"} & set(nodes)
        awaited = {node for node in nodes if dead_s.get(node, 0.0) + waited < patience_s} - down
        if not awaited or given_up():
            break
        sleep(_LOOK_S)
        waited += _LOOK_S
    return down
