"""A node is looked at before it takes another's place: a spare may have been broken since it was booked."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from zslurm.aegis.supervisor.agents import Agents

_CHECK_S = 60.0


def unfit(nodes: Sequence[str], agents: Agents | None, event: Callable[..., None]) -> dict[str, str]:
    """Of these nodes those that must not be used, with the reason.

    A node whose agent does not answer is unfit: a dead one looks just like that. Without agents nothing is known,
    and nothing is held against a node.
    """
    if agents is None or not agents.liveness.any_responding() or not nodes:
        return {}
    answers = agents.ask("check", nodes, timeout_s=_CHECK_S)
    found = {}
    for node in nodes:
        answer = answers.get(node)
        reason = "its agent does not answer" if answer is None else "" if answer.ok else answer.why
        event("spare_checked", node=node, ok=not reason, reason=reason or None)
        if reason:
            found[node] = reason
    return found
