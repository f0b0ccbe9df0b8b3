"""The preflight of the rails, as the supervisor runs it: ask the nodes, decide, record, act."""

from __future__ import annotations

import signal
from collections.abc import Callable, Mapping, Sequence

from zslurm.aegis.policy.outcome import AttemptOutcome, Cause
from zslurm.aegis.supervisor.preflight import Decision, decide
from zslurm.cluster.rails.read_nodes import RailReadings, read_rails
from zslurm.config.spec import RunSpec
from zslurm.core.errors import Exit, ZslurmError
from zslurm.run.run_dir import RunDir
from zslurm.slurm.client import SlurmClient
from zslurm.slurm.exclusion import requeue_excluding
from zslurm.slurm.hostlist import compress, expand
from zslurm.train.jsonl import read_jsonl

Record = Callable[..., None]
"""Records an event: its kind, then fields."""

_TIMEOUT_S = 120.0


def check_rails(
    spec: RunSpec,
    run: RunDir,
    job_id: str,
    nodes: Sequence[str],
    environ: Mapping[str, str],
    record: Record,
    stopped: Callable[[], bool] = lambda: False,
) -> AttemptOutcome | None:
    """Look at the rails of nodes of the job, and do what the policy says.

    Nodes that say nothing are recorded, and no reason to wait: whether a task can start there the ranks will show.

    Args:
        spec: the run.
        run: its directory.
        job_id: its job, which this process runs in.
        nodes: those on which ranks may be started.
        environ: of the job.
        record: writes an event.
        stopped: whether the job was asked to stop meanwhile. A job that was cancelled must not be requeued.

    Returns:
        None where the ranks may start; else how the start of the job ends, be it that it was requeued.
    """
    try:
        found = read_rails(spec.cluster, nodes=nodes, job_id=job_id, timeout_s=_TIMEOUT_S, environ=environ)
    except ZslurmError as error:
        if not stopped():  # which ends the check as well
            record("rails_unknown", reason=str(error))
        return None
    if stopped():
        return None
    _record_warnings(found, record)
    decision = _decide(spec, run, job_id, environ, found)
    if not decision.reason or stopped():
        return None
    policy, faulty = spec.cluster.rail_policy, compress(decision.nodes)
    record("rails_incomplete", nodes=faulty, reason=decision.reason, policy=policy, action=decision.action)
    if decision.action == "start":
        return None
    cause = Cause(decision.reason, node=decision.node)
    if decision.action == "exclude":
        return _exclude(job_id, decision, cause, environ, record)
    return AttemptOutcome("failed", Exit.STOPPED, cause)


def _record_warnings(found: RailReadings, record: Record) -> None:
    if found.unanswered:
        record("rails_unknown", nodes=compress(found.unanswered), reason=next(iter(found.unanswered.values())))
    differing: dict[tuple[str, ...], list[str]] = {}
    for difference in found.differences:
        differing.setdefault(difference.nodes, []).append(str(difference))
    for odd, reasons in differing.items():
        more = f" (and {len(reasons) - 1} more)" if len(reasons) > 1 else ""
        record("rails_differ", nodes=compress(odd), reason=reasons[0] + more)
    doubtful: dict[str, list[str]] = {}
    for one in found.maps:
        for problem in one.problems:
            if not problem.incomplete:
                doubtful.setdefault(problem.message, []).append(one.node)
    for message, nodes in doubtful.items():
        record("rails_doubtful", nodes=compress(nodes), reason=message)


def _decide(spec: RunSpec, run: RunDir, job_id: str, environ: Mapping[str, str], found: RailReadings) -> Decision:
    policy, needed = spec.cluster.rail_policy, len(expand(environ["SLURM_JOB_NODELIST"]))
    if policy != "exclude" or not found.incomplete:
        return decide(policy, found.incomplete, needed=needed)
    client, partition = SlurmClient(environ), environ.get("SLURM_JOB_PARTITION")
    try:
        already = set(expand(client.excluded_nodes(job_id)))
        usable = [node.name for node in client.nodes() if node.is_usable and partition in node.partitions]
    except ZslurmError as error:
        refused = decide("refuse", found.incomplete, needed=needed)
        return Decision("refuse", f"{refused.reason}; it cannot be excluded: {error}", refused.node, refused.nodes)
    return decide(
        policy,
        found.incomplete,
        needed=needed,
        usable=set(usable) - already,
        demanded=expand(spec.slurm.nodelist or ""),
        excluded_before=_excluded_before(run, job_id) | already,
    )


def _excluded_before(run: RunDir, job_id: str) -> set[str]:
    return {
        node
        for event in read_jsonl(run.events)
        if event.get("event") == "nodes_excluded" and event.get("job_id") == job_id
        for node in expand(event["nodes"])
    }


def _exclude(
    job_id: str, decision: Decision, cause: Cause, environ: Mapping[str, str], record: Record
) -> AttemptOutcome:
    """Put the job back into the queue without the faulty nodes. Slurm ends this process soon after."""
    record("nodes_excluded", nodes=compress(decision.nodes), reason=decision.reason)
    # Slurm terminates every process of the job now; what is started from here ignores that as well.
    for signum in (signal.SIGTERM, signal.SIGCONT, signal.SIGINT, signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(signum, signal.SIG_IGN)
    try:
        excluded = requeue_excluding(SlurmClient(environ), job_id, decision.nodes)
    except ZslurmError as error:
        record("exclusion_failed", nodes=compress(decision.nodes), reason=str(error))
        stopped = Cause(f"{cause.message}; it could not be excluded: {error}", node=cause.node)
        return AttemptOutcome("failed", Exit.STOPPED, stopped)
    record("requeued", excluded=excluded, reason=decision.reason)
    return AttemptOutcome("interrupted", Exit.INTERRUPTED, cause)
