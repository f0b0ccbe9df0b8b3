"""Cancel and requeue: through Slurm for its jobs, through signals for local ones."""

from __future__ import annotations

import contextlib
import re
import shlex
import signal
import time
from collections.abc import Callable, Sequence
from typing import NamedTuple

from zslurm.config.load import load_spec
from zslurm.config.spec import RunSpec
from zslurm.core.errors import ConfigError, NotFound, RunActive, SlurmRefused, ZslurmError
from zslurm.core.processes import DetachedProcess, ProcessRecord
from zslurm.job.stop_request import StopSender
from zslurm.job.successor import cancel_successor
from zslurm.run.events import Cancelled, ExcludedByUser, Readmitted, Released, RequeuedByUser
from zslurm.run.exclusions import active_exclusions, read_exclusions
from zslurm.run.find import find
from zslurm.run.identity import job_ids
from zslurm.run.run_dir import RunDir
from zslurm.run.secrets import with_secrets
from zslurm.run.state.run_state import last_job, look, recorded_job
from zslurm.slurm.client import SlurmClient
from zslurm.slurm.exclusion import exclude_requeued, requeue_unchanged
from zslurm.slurm.hostlist import compress, expand
from zslurm.slurm.jobs import JobRecord
from zslurm.slurm.states import JobState
from zslurm.submit.continuation import refuse_completed
from zslurm.submit.held_launch import avoid_nodes, failed_nodes, is_failed_launch
from zslurm.submit.submit import record_action, spec_of, submit

_POLL_S = 0.2
_STARTS_S = 60.0
_STOPS_S = 300.0
# A start in the very second in which the job's earlier run ended on a node fails there ("Job credential revoked").
_RESTART_AFTER_S = 5


def cancel(run: RunDir, *, wait: bool = False) -> str | None:
    """Ask the run's job to save and stop, with `wait` until it has; returns its id, None if nothing is active.

    Raises:
        SlurmUnavailable, SlurmRefused: from Slurm.
        ZslurmError: a local run's processes are on another machine.
    """
    state = look(run)
    _refuse_copy(run, "cancel")
    if not state.active or state.job_id is None:
        return None
    spec = load_spec(run.config)
    if state.launcher == "slurm":
        client = SlurmClient()
        if state.successor is not None:  # first: it would start where the other ends
            cancel_successor(client, state.successor)
        client.cancel(state.job_id)
    else:
        _stop_local(run)
    record_action(run, Cancelled(job_id=state.job_id), spec)
    for helper in state.aegis.helpers:  # the supervisor does so as well, if it lives
        with contextlib.suppress(NotFound):
            SlurmClient().cancel(helper["helper"])
    while wait and look(run).active:
        time.sleep(_POLL_S)
    return state.job_id


def cancel_stray(reference: str) -> str | None:
    """Cancel a job that works in a run's directory, and is not what the run's files call its active job.

    Returns:
        What was done, in one line; None if the reference is no id of such a job.

    Raises:
        SlurmUnavailable, SlurmRefused: from Slurm.
    """
    if not reference.isdecimal():
        return None
    try:
        run = find(reference)
    except NotFound:
        return None
    if reference in (run.name, run.path.name):
        return None  # the name of a run, whatever job has this number
    job, client = last_job(run), SlurmClient()
    if job is not None and (job.launcher != "slurm" or (reference == job.successor and job.successor)):
        return None
    record = client.job(reference)
    if record is None or not record.state.is_active:
        return None
    if job is not None and reference == job.job_id and look(run).active:
        return None
    client.cancel(reference)
    what = "of an earlier submission" if reference in job_ids(run) else "that no submission recorded"
    return f"cancelled job {reference} in {run.path}, {what}"


def cancel_orphan(job: JobRecord, run: RunDir) -> str:
    """Cancel a job whose run directory is gone; returns what was done, in one line.

    Raises:
        SlurmUnavailable, SlurmRefused: from Slurm.
    """
    if not job.state.is_active:
        return f"job {job.job_id} is over ({job.state.lower()}), and its run directory {run.path} is gone"
    SlurmClient().cancel(job.job_id)
    return f"cancelled job {job.job_id}, whose run directory {run.path} is gone (as `scancel {job.job_id}` does)"


def _stop_local(run: RunDir) -> None:
    """Signal the supervisor; wait for it if the run has only just been started."""
    deadline = time.monotonic() + 30.0
    job = last_job(run)
    assert job is not None
    while True:
        supervisor = ProcessRecord.read(run.supervisor)
        if supervisor is not None and not supervisor.here:
            raise ZslurmError(f"{run.name}: it runs on {supervisor.host}; cancel it there")
        if supervisor is not None and supervisor.created >= job.time - 60 and supervisor.signal(signal.SIGTERM):
            return
        if job.process is None or not job.process.alive:
            _stop_ranks(run)  # no supervisor is left to pass it on
            return
        if time.monotonic() > deadline:
            job.process.signal(signal.SIGTERM)
            return
        time.sleep(_POLL_S)


def _stop_ranks(run: RunDir) -> None:
    attempts = run.attempt_dirs()
    step = DetachedProcess.adopt(attempts[-1].step_process, attempts[-1].step_exit) if attempts else None
    if step is not None:
        sender, deadline = StopSender(attempts[-1], step), time.monotonic() + _STARTS_S
        while not sender.send() and step.poll() is None and time.monotonic() < deadline:
            time.sleep(_POLL_S)  # rank 0 has no store yet


def _refuse_copy(run: RunDir, what: str) -> None:
    """Refuse to act on the job in the files of a copied run: it is the original's.

    Raises:
        ZslurmError: `run` is a copy.
    """
    job = recorded_job(run)
    if job is not None and job.original is not None:
        raise ZslurmError(
            f"{run.path}: is a copy of {job.original}, and has no job to {what}: job {job.job_id} is the "
            f"original's (`zslurm {what} {shlex.quote(str(job.original))}`); submit the copy under its own name "
            "to continue it from its checkpoints"
        )


class RequeueResult(NamedTuple):
    """What `requeue` did."""

    job_id: str
    action: str
    """`requeue`; for a job in the queue `exclude` (its list of nodes was changed), `start` (its start time) or
    `release` (it was held)."""
    note: str = ""
    """What a user should know; empty for nothing."""


def requeue(run: RunDir, *, now: bool = False, exclude: str | None = None) -> RequeueResult:
    """Start the run's job again: it continues from its last checkpoint. A job that is held is released.

    If Slurm holds it because it could not be started on a node, that node is excluded first.

    With `now` without the pause that Slurm makes before a requeued job may start, also if the job was requeued
    before. `exclude` is a hostlist of
    nodes that it must not use from now on, besides those excluded already.

    Raises:
        NotFound: the run was never submitted, Slurm has forgotten its job, or a node does not exist.
        ConfigError: nodes are to be excluded that the run asks for, or from a local run.
        RunCompleted: it has trained all its steps.
        ZslurmError: it is a copy of another run, whose job it is.
        RunActive: its job takes too long to leave its nodes.
        SlurmUnavailable, SlurmRefused: from Slurm.
    """
    _refuse_copy(run, "requeue")
    job = last_job(run)
    if job is None:
        raise NotFound(f"{run.name}: it was never submitted; `zslurm submit` starts it")
    spec = spec_of(run)
    refuse_completed(spec, run)
    if job.launcher == "local":
        if exclude is not None:
            raise ConfigError(f"{run.name}: a local run has no nodes to exclude")
        cancel(run, wait=True)
        return RequeueResult(submit(with_secrets(spec, run.secrets)).job_id, "requeue")
    client = SlurmClient()
    job_id = look(run).job_id or job.job_id  # its successor's, where that took its place
    record = client.job(job_id)
    if record is None:
        raise NotFound(
            f"{run.name}: Slurm has forgotten job {job_id}; `zslurm submit` continues the run as a new job"
        )
    note = ""
    if exclude is None and now and record.state is JobState.COMPLETING:  # it may have been requeued just now
        leaves = (JobState.COMPLETING, JobState.REQUEUED)
        record = _await_job(client, job_id, lambda record: record.state not in leaves) or record
    held = record.state is JobState.REQUEUE_HOLD or re.search("held|hold", record.reason.lower()) is not None
    held = held and record.state.is_waiting
    if exclude is None and held:
        note = _avoid_failed_launch(client, record, run, spec)
        action = "release"
        client.release(job_id)
        record_action(run, Released(job_id=job_id), spec)
        if now:
            client.start_in(job_id, _RESTART_AFTER_S)
    elif exclude is None and now and record.state.is_waiting:
        action = "start"
        client.start_in(job_id, _RESTART_AFTER_S)
    elif exclude is None:
        action = "requeue"
        client.requeue(job_id)
        record_action(run, RequeuedByUser(job_id=job_id), spec)
    else:
        nodes, note = _nodes_to_exclude(client, exclude, spec)
        action = _requeue_without(client, record, nodes)
        kind = RequeuedByUser if action == "requeue" else ExcludedByUser
        record_action(run, kind(job_id=job_id, excluded=compress(nodes)), spec)
        if held:
            client.release(job_id)
            record_action(run, Released(job_id=job_id), spec)
    if now and action == "requeue":
        _start_now(client, job_id)
    elif now and action == "exclude":
        client.start_in(job_id, _RESTART_AFTER_S)
    return RequeueResult(job_id, action, note)


def readmit(run: RunDir, nodes: str) -> list[str]:
    """Let a run use excluded nodes again: from its next attempt on, and if its job waits, in Slurm's list.

    Returns:
        The nodes that were excluded, of those named.

    Raises:
        ConfigError: `nodes` is no hostlist.
        NotFound: none of the nodes is excluded, or the run was never submitted.
        SlurmUnavailable, SlurmRefused: from Slurm, before anything is recorded.
    """
    named = expand(nodes)
    job = last_job(run)
    if job is None:
        raise NotFound(f"{run.name}: it was never submitted, and excludes no node")
    state = look(run)
    of_run = active_exclusions(read_exclusions(run), time.time())
    excluded_now = {*state.aegis.excluded, *of_run}  # also those of commands (held_launch.py)
    client, job_id = SlurmClient(), state.job_id or job.job_id
    listed: list[str] = []
    record = client.job(job_id) if job.launcher == "slurm" and state.active else None
    if record is not None and record.state.is_waiting:
        listed = expand(client.excluded_nodes(job_id))
    if not (removed := [node for node in named if node in excluded_now or node in listed]):
        raise NotFound(
            f"{run.name}: {nodes} is not excluded; `zslurm cluster exclude ls {run.name}` lists what is"
        )
    if set(listed) & set(removed):
        client.update(job_id, ExcNodeList=compress(node for node in listed if node not in removed))
    record_action(run, Readmitted(job_id=job_id, nodes=compress(removed)), spec_of(run))
    return removed


def _avoid_failed_launch(client: SlurmClient, record: JobRecord, run: RunDir, spec: RunSpec) -> str:
    """Exclude the nodes on which a job that is held could not be started, and return what a user should know."""
    if not is_failed_launch(record.reason):
        return ""
    avoided = avoid_nodes(client, record, run, spec, failed_nodes(client, record))
    return avoided.problem or f"it could not be started on {avoided.nodes}, which it avoids from now on"


def _nodes_to_exclude(client: SlurmClient, exclude: str, spec: RunSpec) -> tuple[list[str], str]:
    """Return the nodes of a hostlist, checked before anything is done to the job, and a note if they cannot be."""
    nodes, note = expand(exclude), ""
    if not nodes:
        raise ConfigError("--exclude: no node is named")
    try:
        node_names = {node.name for node in client.nodes()}
    except SlurmRefused as error:
        node_names, note = (
            set(nodes),
            f"names are taken as given: the site hides its nodes (PrivateData=nodes): {error}",
        )
    if unknown := [name for name in nodes if name not in node_names]:
        raise NotFound(f"--exclude: the cluster has no node {compress(unknown)}")
    required = set(expand(spec.slurm.nodelist or ""))
    if both := sorted(required.intersection(nodes)):
        raise ConfigError(f"--exclude: the run asks for {compress(both)} by name (slurm.nodelist)")
    return nodes, note


def _requeue_without(client: SlurmClient, job: JobRecord, nodes: Sequence[str]) -> str:
    """Move a job off nodes for good: its list of excluded nodes grows before it can start again.

    Returns:
        What was done: `requeue`, or `exclude` if the job only waited in the queue.

    Raises:
        ZslurmError: Slurm refused or did not answer; the message has the state in which the job was left.
    """
    requeued = not job.state.is_waiting
    if requeued:
        requeue_unchanged(client, job.job_id, job.restarts)
    deadline = time.monotonic() + _STOPS_S
    while (done := exclude_requeued(client, job.job_id, nodes)).problem and time.monotonic() < deadline:
        record = client.job(job.job_id)
        if done.is_final or record is None:
            break
        if not (record.state.is_waiting or record.state is JobState.COMPLETING):
            break
    if requeued:
        record = client.job(job.job_id)
        if record is not None and record.state is JobState.COMPLETING:
            record = _await_job(client, job.job_id, lambda record: record.state is not JobState.COMPLETING)
        if record is None or record.state.is_over:
            raise SlurmRefused(f"job {job.job_id} ended meanwhile (was it cancelled?); it is not requeued")
    if problem := done.problem:
        outcome = f"job {job.job_id} is requeued, but may use these nodes" if requeued else "nothing was changed"
        raise SlurmRefused(f"{problem}; {outcome}")
    if requeued:
        _await_job(client, job.job_id, lambda record: record.state.is_waiting)
    return "requeue" if requeued else "exclude"


def _start_now(client: SlurmClient, job_id: str) -> None:
    """Once the job is pending again, lift the start time that Slurm set (earlier it would be overwritten)."""
    settled = (JobState.PENDING, JobState.RUNNING)
    record = _await_job(client, job_id, lambda record: bool(record.restarts) and record.state in settled)
    if record is not None and record.state is JobState.PENDING:
        client.start_in(job_id, _RESTART_AFTER_S)


def _await_job(client: SlurmClient, job_id: str, settled: Callable[[JobRecord], bool]) -> JobRecord | None:
    """Wait until a requeued job has settled; None if Slurm has forgotten it.

    Raises:
        RunActive: it takes too long.
    """
    deadline = time.monotonic() + _STOPS_S
    while time.monotonic() < deadline:
        record = client.job(job_id)
        if record is None or settled(record):
            return record
        time.sleep(1.0)
    raise RunActive(
        f"job {job_id} still leaves its nodes after {_STOPS_S / 60:g} minutes; `squeue -j {job_id}` shows it"
    )
