"""The check of spare nodes: when the job starts, and again before ranks are placed on one.

One may have been broken since it was booted. Its agent examines it (aegis/agent/node_check.py).
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Mapping

from zslurm.aegis.supervisor.agents.agents import Agents
from zslurm.aegis.supervisor.job import Job
from zslurm.run.events import SpareChecked

CHECK_S = 60.0
"""Seconds that an agent gets to check its node."""

NO_ANSWER = "its agent does not answer"


def unfit_spares(job: Job, agents: Agents, nodes: Collection[str], timeout_s: float = CHECK_S) -> dict[str, str]:
    """Check spares; return those that must not be used, with the reason, and record each result.

    A node whose agent does not answer is unfit, for a dead one looks the same. While no agent answers, nothing is
    known, and every node is fit.
    """
    if not agents.liveness.any_responding() or not nodes:
        return {}
    answers = agents.ask("check", sorted(nodes), timeout_s=timeout_s)
    found = {}
    for node in sorted(nodes):
        answer = answers.get(node)
        reason = NO_ANSWER if answer is None else "" if answer.ok else answer.why
        if agents.over:  # nothing can be recorded any more
            break
        job.record(SpareChecked(node=node, ok=not reason, reason=reason or None))
        if reason:
            found[node] = reason
    return found


class SpareChecks:
    """Checks spares in threads, so that the ranks are watched meanwhile."""

    def __init__(self, check: Callable[[Collection[str]], Mapping[str, str]]) -> None:
        """Prepare; `check` returns the nodes that are unfit, with the reason."""
        self._check = check
        self._started: set[str] = set()
        self._ended: dict[str, str] = {}

    def unfit(self, nodes: Collection[str]) -> dict[str, str] | None:
        """Return those of some nodes that are unfit, with the reason; None until their checks have ended.

        A check that was not made since `forget` is begun.
        """
        if more := set(nodes) - self._started:
            self._started |= more
            work = threading.Thread(target=self._run, args=(more, self._ended), name="spares", daemon=True)
            work.start()
        ended = dict(self._ended)
        if not ended.keys() >= set(nodes):
            return None
        return {node: ended[node] for node in nodes if ended[node]}

    def forget(self) -> None:
        """Have each spare checked again before its next use."""
        self._started, self._ended = set(), {}

    def _run(self, nodes: Collection[str], ended: dict[str, str]) -> None:
        unfit = self._check(nodes)
        ended.update({node: unfit.get(node, "") for node in nodes})
