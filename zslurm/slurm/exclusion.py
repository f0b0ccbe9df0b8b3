"""Start a job again elsewhere: requeue it with nodes added to those that it must not use."""

from __future__ import annotations

import contextlib
import re
import time
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass

from zslurm.core.errors import SlurmRefused, SlurmUnavailable, ZslurmError
from zslurm.slurm.client import SlurmClient
from zslurm.slurm.hostlist import compress, expand
from zslurm.slurm.jobs import JobRecord
from zslurm.slurm.states import JobState


@dataclass(frozen=True)
class JobSize:
    """The nodes that a job asks for, its tasks on each, and the CPUs of each task."""

    nodes: int
    tasks_per_node: int
    cpus_per_task: int

    def settings(self) -> dict[str, str]:
        """By scontrol's names. With the CPUs: they stay as they were, and fewer nodes have fewer CPUs."""
        tasks = self.nodes * self.tasks_per_node
        cpus = tasks * self.cpus_per_task
        return {"NumNodes": str(self.nodes), "NumTasks": str(tasks), "NumCPUs": str(cpus)}


@dataclass(frozen=True)
class RequeueResult:
    """A job that is back in the queue.

    Attributes:
        excluded: the nodes that it excludes from now on, as Slurm shows them afterwards: a hostlist.
        problem: why Slurm did not take the changes; empty if it did.
        is_final: it would not take them later either.
    """

    excluded: str = ""
    problem: str = ""
    is_final: bool = False


def has_left(job: JobRecord | None, restarts: int) -> bool:
    """Return whether a job is back in the queue, or on its way; it was requeued `restarts` times before it ran.

    Slurm counts a requeue when it takes it: a job that completes with the same count was cancelled, or ended.
    """
    if job is None:
        return False
    return job.state.is_waiting or (job.state is JobState.COMPLETING and job.restarts > restarts)


_WAITS = "Job is pending execution"
"""With this Slurm refuses to requeue a job that was requeued already, also one that still leaves its nodes."""


def requeue_unchanged(client: SlurmClient, job_id: str, restarts: int) -> None:
    """Requeue a job with the settings that it has; `restarts` is how often it was requeued before it ran.

    One that was requeued already, unseen, is fine.

    Raises:
        NotFound: Slurm does not know the job.
        SlurmUnavailable: it may have been done; call it again.
        SlurmRefused: from Slurm.
    """
    try:
        client.requeue(job_id)
    except SlurmRefused as error:
        if _WAITS not in str(error):
            raise
    except SlurmUnavailable:
        if not has_left(client.queue([job_id]).get(job_id), restarts):
            raise


def requeue_excluding(
    client: SlurmClient,
    job_id: str,
    nodes: Collection[str],
    *,
    restarts: int,
    expired: Collection[str] = (),
    size: JobSize | None = None,
    on_requeued: Callable[[], None] = lambda: None,
    sleep: Callable[[float], None] = time.sleep,
) -> RequeueResult:
    """Requeue a job without these nodes and those that it excludes already.

    The job is never held: Slurm starts a requeued job after two minutes, and its list is changed before that. A
    hold would have to be taken back, and while a job with a dead node completes, Slurm answers a release with
    "Unexpected message received" and exit code 0. If the list cannot be changed, the job starts anyway, and
    its supervisor avoids the nodes or requeues it again (aegis/supervisor/attempt_starter.py).

    With the requeue Slurm sends SIGTERM to every process of the job, the caller and its scontrol included if they
    are part of it, and SIGKILL after KillWait (default: 30 s). So the caller ignores SIGTERM first; its children
    inherit that.

    The job was requeued `restarts` times before it ran. It may use the nodes in `expired` again. With `size` it
    asks for that much from now on, instead of as much as before: a job that fills its partition, and excludes a
    node of it, would wait forever.
    `on_requeued` is called before the list is changed: Slurm may kill the caller at any time.

    Raises:
        NotFound: Slurm does not know the job.
        SlurmUnavailable: the job may be requeued; call it again.
        SlurmRefused: from Slurm; the job was not requeued.
    """
    requeue_unchanged(client, job_id, restarts)
    on_requeued()
    if not (nodes or expired or size is not None):
        return RequeueResult()
    return exclude_requeued(client, job_id, nodes, expired=expired, size=size, sleep=sleep)


def exclude_requeued(
    client: SlurmClient,
    job_id: str,
    nodes: Collection[str],
    *,
    expired: Collection[str] = (),
    size: JobSize | None = None,
    sleep: Callable[[float], None] = time.sleep,
) -> RequeueResult:
    """As `requeue_excluding`, for a job that `has_left` already: only its settings are changed.

    Slurm may refuse changes while it ends the job on its nodes. So they are tried again, until Slurm shows the
    nodes as excluded, or for 20 seconds. A refusal that does not depend on that is not tried again.
    """
    shown, problem = "", ""
    deadline = time.monotonic() + _CHANGES * _LOOK_S
    for attempt in range(_CHANGES):
        if attempt:
            if time.monotonic() > deadline:  # the answers took that long
                break
            sleep(_LOOK_S)
        try:
            kept = [node for node in expand(client.excluded_nodes(job_id)) if node not in expired]
            settings = size.settings() if size is not None else {}
            client.update(job_id, ExcNodeList=compress([*kept, *nodes]), **settings)
            shown = client.excluded_nodes(job_id)
        except (SlurmRefused, SlurmUnavailable) as error:
            problem = str(error)
            if _FINAL.search(problem):
                return RequeueResult(shown, problem, is_final=True)
            continue
        if not (missing := set(nodes).difference(expand(shown))):
            return RequeueResult(shown)
        problem = f"Slurm does not show {compress(missing)} as excluded, though scontrol update said nothing"
    return RequeueResult(shown, problem)


_FINAL = re.compile(
    r"Invalid (?:node name|job id|user id|feature|account)|permission denied|accounting/QOS policy"
    r"|node configuration is not available",
    re.IGNORECASE,
)
"""Refusals that do not depend on the state of the job."""

_LOOK_S = 2.0
_CHANGES = 10
"""Times that a change of a requeued job is tried."""
_SLURMD_TIMEOUT_S = 300.0
_NOTICES_S = 60.0


def wait_until_down(
    client: SlurmClient,
    nodes: Collection[str],
    *,
    dead_s: Mapping[str, float] | None = None,
    given_up: Callable[[], bool] = lambda: False,
    on_hidden: Callable[[float], None] = lambda _: None,
    sleep: Callable[[float], None] = time.sleep,
) -> set[str]:
    """Wait until Slurm itself calls dead nodes down: SlurmdTimeout after their last message, up to a minute more.

    A job that is requeued before that keeps a part of its books on the dead node, and starts again without its
    GPUs: `JOB_GRES=(null)`, and every srun in it fails with "Invalid generic resource (gres) specification" (seen
    with Slurm 22.05).

    `dead_s` are the seconds for which a node has been dead already: one that Slurm did not call down in all that
    time it never will, or it has come back since. Waiting ends if `given_up` returns True.

    If the site hides its nodes (PrivateData=nodes), Slurm is asked once, `on_hidden` is called with the seconds
    that are left to wait, and then they pass without a question.

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
    hidden = reported = False
    while nodes:
        if not hidden:
            with contextlib.suppress(ZslurmError):
                shown = client.nodes_if_shown()
                hidden = shown is None
                down = {node.name for node in shown or () if node.state == "down"} & set(nodes)
        awaited = {node for node in nodes if dead_s.get(node, 0.0) + waited < patience_s} - down
        if not awaited or given_up():
            break
        if hidden and not reported:
            reported = True
            on_hidden(patience_s - waited - min(dead_s.get(node, 0.0) for node in awaited))
        sleep(_LOOK_S)
        waited += _LOOK_S
    return down
