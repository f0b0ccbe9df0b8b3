"""Release jobs that Slurm holds because a node could not start them, without that node.

Slurm requeues such a job, holds it ("launch failed requeued held") and waits for a person. Its owner may change
its list of excluded nodes and release it. No process of the run is alive then: commands that show runs do it.
"""

from __future__ import annotations

import getpass
import time
from collections.abc import Sequence
from typing import NamedTuple

from zslurm.aegis.core.policy.policy import most_excluded
from zslurm.checkpoint_tools.quantities import counted
from zslurm.config.load import load_spec
from zslurm.config.spec import RunSpec
from zslurm.core.errors import RunActive, SlurmRefused, SlurmUnavailable, ZslurmError
from zslurm.run.events import AttemptStarted, NodesExcluded, NotReleased, Released
from zslurm.run.events.event import select
from zslurm.run.exclusions import excluded_by_run, read_exclusions
from zslurm.run.run_dir import RunDir
from zslurm.run.state.run_state import RunState, last_job
from zslurm.slurm.client import SlurmClient
from zslurm.slurm.exclusion import exclude_requeued
from zslurm.slurm.hostlist import compress, expand
from zslurm.slurm.jobs import JobRecord
from zslurm.slurm.run_command import Retries
from zslurm.submit.submit import record_action
from zslurm.submit.submit_lock import submit_lock
from zslurm.train.jsonl import read_jsonl

MOST_RELEASES = 3
"""Releases in a row, without a start between them, after which the fault is looked for in the job."""

_CAUSE = "Slurm could not start the job there"


def is_failed_launch(reason: str | None) -> bool:
    """Return whether Slurm's reason for holding a job is that a node could not start it."""
    return "launch failed" in (reason or "").lower().replace("_", " ")


class AvoidedNodes(NamedTuple):
    """The nodes that a job avoids from now on, and why it may get others of its last nodes again."""

    nodes: str
    problem: str = ""


def release_failed_launches(states: Sequence[RunState]) -> list[str]:
    """Release the held jobs of this user that a node could not start; return a line for each.

    A job that stays held has a line as well: why, and what to do. Runs of other users and jobs about which
    Slurm does not answer have none.
    """
    lines = []
    for state in states:
        if state.state == "held" and state.as_of is None and state.job_id and is_failed_launch(state.reason):
            try:
                line = _release(state.run, state.job_id)
            except (SlurmUnavailable, RunActive):  # the next look is soon enough, or another process does it now
                continue
            except (ZslurmError, OSError) as error:
                line = f"job {state.job_id} could not be started and stays held: {_one_line(error)}"
            if line:
                lines.append(f"{state.run.name}: {line}")
    return lines


def _release(run: RunDir, job_id: str) -> str:
    job = last_job(run)
    if job is None or job.user != getpass.getuser():
        return ""
    spec, client = load_spec(run.config), SlurmClient(retries=Retries(attempts=1))
    if spec.aegis.mode != "act":
        remedy = f"`zslurm requeue {run.name}` releases it without the node"
        return f"job {job_id} could not be started and stays held, as aegis.mode is {spec.aegis.mode}: {remedy}"
    with submit_lock(run):
        record = client.job(job_id)  # the state may be some seconds old
        if record is None or not (record.state.is_waiting and is_failed_launch(record.reason)):
            return ""
        releases, refusal = _since_last_start(run, record)
        if refusal is None:
            nodes = failed_nodes(client, record)
            refusal = _why_not(run, spec, nodes, releases)
            if not refusal:
                avoided = avoid_nodes(client, record, run, spec, nodes)
                try:
                    client.release(job_id)
                except SlurmRefused as error:
                    refusal = f"Slurm refused to release it ({_one_line(error)}): ask your site to release it"
                else:
                    record_action(run, Released(job_id=job_id, reason="it could not be started"), spec)
                    return _released(job_id, avoided)
            record_action(run, NotReleased(job_id=job_id, restarts=record.restarts, reason=refusal), spec)
    return f"job {job_id} could not be started and stays held: {refusal}"


def _since_last_start(run: RunDir, record: JobRecord) -> tuple[int, str | None]:
    """Return how often the job was released since its last start, and why it was not after this requeue."""
    rows = sorted([*read_jsonl(run.events), *read_jsonl(run.submissions)], key=lambda row: row.get("time") or 0.0)
    releases, refusal = 0, None
    for event in select(rows, AttemptStarted, Released, NotReleased):
        if event.job_id != record.job_id:
            continue
        if isinstance(event, AttemptStarted):
            releases = 0
        elif isinstance(event, Released):
            releases += event.reason is not None  # else a person did it
        elif isinstance(event, NotReleased) and event.restarts == record.restarts:
            refusal = event.reason
    return releases, refusal


def failed_nodes(client: SlurmClient, record: JobRecord) -> list[str]:
    """Return the nodes of the job's last run on which it could not be started; none if they are not known.

    Accounting shows the nodes of that run. If Slurm has drained some of them since, as after a prolog that failed,
    it was these; otherwise the first, on which the batch script starts.
    """
    past = [expand(run.nodes) for run in client.history([record.job_id]).get(record.job_id, ()) if run.nodes]
    if not past:
        return []
    drained = {node.name for node in client.nodes_if_shown() or () if node.is_draining or node.is_down}
    return [node for node in past[-1] if node in drained] or past[-1][:1]


def avoid_nodes(
    client: SlurmClient, record: JobRecord, run: RunDir, spec: RunSpec, nodes: Sequence[str]
) -> AvoidedNodes:
    """Add nodes to the list of those that a waiting job must not use, and to the exclusions of its run.

    Raises:
        ZslurmError: the run's files cannot be written.
    """
    if not nodes:
        return AvoidedNodes("", "the node on which it could not be started is not known: it may get it again")
    shown = compress(nodes)
    if set(nodes) & set(expand(spec.slurm.nodelist or "")):
        return AvoidedNodes("", f"the run asks for {shown} by name, on which it could not be started")
    done = exclude_requeued(client, record.job_id, nodes)
    if done.problem:
        return AvoidedNodes("", f"{done.problem}; it may get {shown} again, on which it could not be started")
    expires = time.time() + spec.aegis.exclude_for_s
    excluded = NodesExcluded(job_id=record.job_id, nodes=shown, expires=expires, reason=_CAUSE)
    record_action(run, excluded, spec)
    return AvoidedNodes(shown)


def _why_not(run: RunDir, spec: RunSpec, nodes: Sequence[str], releases: int) -> str:
    """Return why a job must wait for a person; empty if it may be released."""
    again = f"`zslurm requeue {run.name}` tries again"
    if releases >= MOST_RELEASES:
        return f"it was released {releases} times in a row, so the job itself may be at fault; {again}"
    if releases and not nodes:
        return (
            "it failed on a node that is not known, as this Slurm has no accounting: ask your site which one it "
            f"is; `zslurm requeue {run.name} --exclude NODE` avoids it"
        )
    excluded = excluded_by_run(read_exclusions(run), time.time()).union(nodes)
    most = most_excluded(spec.aegis, spec.slurm.nodes)
    if nodes and len(excluded) > most:
        limit = f"more than {counted(most, 'node')} would be excluded (aegis.max_excluded)"
        return f"with {compress(nodes)} {limit}; {again}"
    return ""


def _released(job_id: str, avoided: AvoidedNodes) -> str:
    if avoided.nodes:
        done = f"it avoids {avoided.nodes} from now on"
        return f"job {job_id} could not be started on {avoided.nodes} and was held; {done} and is released"
    return f"job {job_id} could not be started and was held; it is released, but {avoided.problem}"


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split())
