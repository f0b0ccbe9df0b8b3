"""Before the ranks start: are the rails of every node of the job whole?

A job whose rank 6 of node 17 has no network hangs in its first all-to-all, minutes after a thousand ranks were
started, and every rank is suspect. So the nodes are asked first (one Slurm step, one task each), if the
profile knows the rails. `cluster.rail_policy` sets what follows (core/policy/rails.py).
"""

from __future__ import annotations

import signal
import time
from collections.abc import Sequence

from zslurm.aegis.core.policy.outcome import AttemptOutcome, Cause
from zslurm.aegis.core.policy.rails import RailDecision, decide_rails, describe_rails
from zslurm.aegis.supervisor.job import Job
from zslurm.cluster.rails.read_nodes import RailReadings, read_rails
from zslurm.core.errors import Exit, ZslurmError
from zslurm.run.events import (
    ExclusionFailed,
    NodesExcluded,
    RailsDiffer,
    RailsDoubtful,
    RailsIncomplete,
    RailsUnknown,
    Requeued,
)
from zslurm.run.events.event import select
from zslurm.run.exclusions import active_exclusions, exclusions_in
from zslurm.slurm.client import SlurmClient
from zslurm.slurm.environment import job_nodes, partition_of_job
from zslurm.slurm.exclusion import requeue_excluding
from zslurm.slurm.hostlist import by_reason, compress, expand
from zslurm.slurm.inventory import usable_nodes
from zslurm.train.jsonl import read_jsonl

_TIMEOUT_S = 120.0


def check_rails(job: Job, nodes: Sequence[str]) -> AttemptOutcome | None:
    """Look at the rails of nodes of the job, and do what the policy says.

    Nodes that do not answer are recorded, and nothing waits for them: the ranks will show whether a task can start
    there.

    Returns:
        None if the ranks may start, or the job is asked to stop: one that was cancelled must not be
        requeued. Else how the start of the job ends, be it that it was requeued.
    """
    cluster = job.spec.cluster
    try:
        readings = read_rails(cluster, nodes=nodes, job_id=job.job_id, timeout_s=_TIMEOUT_S, environ=job.environ)
    except ZslurmError as error:
        if not job.stop.asked:  # which ends the check as well
            job.record(RailsUnknown(reason=str(error)))
        return None
    if job.stop.asked:
        return None
    _record_warnings(job, readings)
    decision = _decide(job, readings)
    if not decision.reason or job.stop.asked:
        return None
    faulty, action = compress(decision.nodes), decision.action
    policy = cluster.rail_policy
    job.record(RailsIncomplete(nodes=faulty, reason=decision.reason, policy=policy, action=action))
    if action == "start":
        return None
    if action == "exclude":
        return _exclude(job, decision)
    return AttemptOutcome("failed", Exit.STOPPED, Cause(decision.reason, node=decision.nodes[0]))


def _record_warnings(job: Job, found: RailReadings) -> None:
    if found.unanswered:
        reason = next(iter(found.unanswered.values()))
        job.record(RailsUnknown(nodes=compress(found.unanswered), reason=reason))
    differing: dict[tuple[str, ...], list[str]] = {}
    for difference in found.differences:
        differing.setdefault(difference.nodes, []).append(str(difference))
    for odd, reasons in differing.items():
        more = f" (and {len(reasons) - 1} more)" if len(reasons) > 1 else ""
        job.record(RailsDiffer(nodes=compress(odd), reason=reasons[0] + more))
    doubtful = (
        (p.message, rail_map.node) for rail_map in found.maps for p in rail_map.problems if not p.incomplete
    )
    for message, nodes in by_reason(doubtful).items():
        job.record(RailsDoubtful(nodes=nodes, reason=message))


def _decide(job: Job, found: RailReadings) -> RailDecision:
    environ, needed = job.environ, len(job_nodes(job.environ))
    if job.spec.cluster.rail_policy != "exclude" or not found.incomplete:
        return decide_rails(job.spec.cluster.rail_policy, found.incomplete, needed=needed)
    client = SlurmClient(environ)
    try:
        already = set(expand(client.excluded_nodes(job.job_id)))
        shown = client.nodes_if_shown()
    except ZslurmError as error:
        reason = f"{describe_rails(found.incomplete)}; it cannot be excluded: {error}"
        return RailDecision("refuse", reason, tuple(found.incomplete))
    partition = partition_of_job(environ) or ""
    usable = None if shown is None else usable_nodes(shown, partition) - already
    of_job = [e for e in select(read_jsonl(job.run.events), NodesExcluded, Requeued) if e.job_id == job.job_id]
    # The supervisor may have died before it requeued the job without the nodes that it excluded last.
    requeued = max((at for at, event in enumerate(of_job) if isinstance(event, Requeued)), default=0)
    return decide_rails(
        "exclude",
        found.incomplete,
        needed=needed,
        usable=usable,
        demanded=expand(job.spec.slurm.nodelist or ""),
        excluded_before=already.union(active_exclusions(exclusions_in(of_job[:requeued]), time.time())),
    )


def _exclude(job: Job, decision: RailDecision) -> AttemptOutcome:
    """Put the job back into the queue without the faulty nodes. Slurm ends this process soon after."""
    nodes, reason = compress(decision.nodes), decision.reason
    job.exclude(decision.nodes, reason)
    # Slurm terminates every process of the job now; what is started from here ignores that as well.
    for signum in (signal.SIGTERM, signal.SIGCONT, signal.SIGINT, signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(signum, signal.SIG_IGN)
    client = SlurmClient(job.environ)
    try:
        before = expand(client.excluded_nodes(job.job_id))
        # Recorded before the list is changed, which takes a while: a supervisor that is killed meanwhile must not
        # exclude the node in vain again and again.
        done = requeue_excluding(
            client, job.job_id, decision.nodes, restarts=job.restart,
            on_requeued=lambda: job.record_requeue(compress({*before, *decision.nodes}), reason),
        )  # fmt: skip
    except ZslurmError as error:
        job.record(ExclusionFailed(nodes=nodes, reason=str(error)))
        cause = Cause(f"{reason}; it could not be excluded: {error}", node=decision.nodes[0])
        return AttemptOutcome("failed", Exit.STOPPED, cause)
    if done.problem:
        job.record(ExclusionFailed(nodes=nodes, reason=done.problem))
    return AttemptOutcome("interrupted", Exit.INTERRUPTED, Cause(reason, node=decision.nodes[0]))
