"""Start a job again elsewhere: requeue it with nodes added to those that it must not use."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass

from zslurm.errors import SlurmRefused, ZslurmError
from zslurm.slurm.client import SlurmClient
from zslurm.slurm.hostlist import compress, expand


@dataclass(frozen=True)
class Size:
    """How much a job asks for.

    Attributes:
        nodes: that it wants.
        tasks_per_node: of the job.
        cpus_per_task: of the job.
    """

    nodes: int
    tasks_per_node: int
    cpus_per_task: int

    def settings(self) -> dict[str, str]:
        """By scontrol's names. With the CPUs: they stay as they were, and fewer nodes do not have so many."""
        tasks = self.nodes * self.tasks_per_node
        cpus = tasks * self.cpus_per_task
        return {"NumNodes": str(self.nodes), "NumTasks": str(tasks), "NumCPUs": str(cpus)}


def requeue_excluding(
    client: SlurmClient,
    job_id: str,
    nodes: Iterable[str],
    *,
    forgiven: Collection[str] = (),
    size: Size | None = None,
) -> str:
    """Requeue a job without these nodes and those that it excludes already; returns all of them, as a hostlist.

    The job is held meanwhile: a plain requeue could start it before its list is changed. It is released in any
    case. Called from inside the job, this is a race: with the requeue Slurm sends SIGTERM to every process of the
    job, this one and its scontrol included, and SIGKILL after KillWait (30 s where the site did not change it). So
    the caller ignores SIGTERM first, which its children inherit. Where Slurm has requeued the job by itself
    meanwhile, only its settings are changed.

    Args:
        client: asks Slurm.
        job_id: the job.
        nodes: to exclude from now on.
        forgiven: nodes that it may use again.
        size: ask for so much from now on; default: as much as before. A job that fills its partition, and excludes
            a node of it, would wait for ever.

    Raises:
        NotFound: Slurm does not know the job.
        SlurmUnavailable, SlurmRefused: from Slurm.
    """
    already = [node for node in expand(client.excluded_nodes(job_id)) if node not in forgiven]
    union = compress([*already, *nodes])
    changes = {"ExcNodeList": union}
    if size is not None:
        changes |= size.settings()
    try:
        client.requeue_hold(job_id)
    except SlurmRefused:
        record = client.job(job_id)
        if record is None or not record.state.is_waiting:
            raise
        client.hold(job_id)
    try:
        client.update(job_id, **changes)
    finally:
        client.release(job_id)
    return union


_LOOK_S = 2.0
_SLURMD_TIMEOUT_S = 300.0
_NOTICES_S = 60.0


def wait_until_down(
    client: SlurmClient,
    nodes: Collection[str],
    *,
    given_up: Callable[[], bool] = lambda: False,
    sleep: Callable[[float], None] = time.sleep,
) -> set[str]:
    """Wait until Slurm itself calls dead nodes down: SlurmdTimeout after their last word, and up to a minute more.

    A job that is requeued before that keeps a part of its books on the dead node, and starts again without its
    GPUs: `JOB_GRES=(null)`, and every srun in it fails with "Invalid generic resource (gres) specification" (seen
    with Slurm 22.05).

    Returns:
        Those that are down. They need not be excluded: Slurm starts nothing there. And they cannot be: a job that
        lost a node is changed only once it has left the others too ("the DB index is being set").

    Args:
        client: asks Slurm.
        nodes: that are dead.
        given_up: whether it is of no use any more.
        sleep: waits.
    """
    down: set[str] = set()
    waited, patience_s = 0.0, _SLURMD_TIMEOUT_S + _NOTICES_S
    if nodes:
        with contextlib.suppress(ZslurmError):
            patience_s = _slurmd_timeout(client) + _NOTICES_S
    while nodes and waited < patience_s and not given_up():
        with contextlib.suppress(ZslurmError):
            down = {node.name for node in client.nodes() if node.state == "down"} & set(nodes)
            if down == set(nodes):
                break
        sleep(_LOOK_S)
        waited += _LOOK_S
    return down


def _slurmd_timeout(client: SlurmClient) -> float:
    words = client.scontrol_config().get("SlurmdTimeout", "").split()
    return float(words[0]) if words and words[0].isdigit() else _SLURMD_TIMEOUT_S
