"""The check of spare nodes: when the job starts, and again before ranks are placed on one.

One may have been broken since it was booted. Its agent examines it (aegis/agent/node_check.py).
"""

from __future__ import annotations

from collections.abc import Collection

from zslurm.aegis.core.messages import NO_ANSWER
from zslurm.aegis.supervisor.agents.agents import Agents
from zslurm.aegis.supervisor.job import Job
from zslurm.run.events import SpareChecked
from zslurm.slurm.environment import task_node

CHECK_S = 60.0
"""Seconds that an agent gets to check its node."""


def unfit_spares(job: Job, agents: Agents, nodes: Collection[str], timeout_s: float = CHECK_S) -> dict[str, str]:
    """Check spares; return those that must not be used, with the reason, and record each result.

    A node whose agent does not answer is unfit, for a dead one looks the same. While no agent answers, nothing is
    known, and every node is fit. So it is if only the agent of this node does, of several: it may be cut off.
    """
    if not agents.liveness.any_responding() or not nodes:
        return {}
    answers = agents.ask("check", sorted(nodes), timeout_s=timeout_s)
    if not answers and agents.liveness.hears_only(task_node(job.environ)):
        return {}
    unfit = {}
    for node in sorted(nodes):
        answer = answers.get(node)
        reason = NO_ANSWER if answer is None else "" if answer.ok else answer.why
        if agents.over:  # nothing can be recorded any more
            break
        job.record(SpareChecked(node=node, ok=not reason, reason=reason or None))
        if reason:
            unfit[node] = reason
    return unfit
