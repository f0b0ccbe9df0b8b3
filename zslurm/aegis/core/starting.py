"""With what a supervisor begins: the nodes of the first attempt, and what an earlier one has left."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from zslurm.aegis.core.policy.outcome import AttemptOutcome
from zslurm.aegis.fault_kinds import NODE_DEAD
from zslurm.aegis.types import Decision
from zslurm.run.events import (
    AttemptEnded,
    AttemptStarted,
    Decided,
    DeputyActed,
    FaultDetected,
    Requeued,
    RequeuedByUser,
)
from zslurm.run.events.event import Event
from zslurm.run.exclusions import Exclusion


@dataclass(frozen=True)
class PendingDecision:
    """What was decided after an attempt, and may not be done yet.

    Attributes:
        decision: what to do.
        outcome: how the attempt ended.
        attempt: its number.
    """

    decision: Decision
    outcome: AttemptOutcome
    attempt: int


def pending_decision(
    decided: Sequence[Decided], ended: Sequence[AttemptEnded], attempt: int
) -> PendingDecision | None:
    """Return the last decision after an attempt, with how the attempt ended; None if one is not known."""
    decisions = [made for event in decided if (made := Decision.of(event.row)) is not None]
    outcomes = [outcome for event in ended if (outcome := AttemptOutcome.of(event.row)) is not None]
    if not (decisions and outcomes):
        return None
    return PendingDecision(decisions[-1], outcomes[-1], attempt)


def decided_requeue(events: Sequence[Event], job_id: str) -> Decision | None:
    """Return the requeue that an earlier supervisor decided and perhaps did not carry out; None if there is none.

    Args:
        events: of the run.
        job_id: of the present job.
    """
    pending: Decision | None = None
    for event in events:
        if isinstance(event, AttemptStarted | AttemptEnded | Requeued):
            pending = None
        elif isinstance(event, Decided):
            pending = Decision.of(event.row) if event.job_id == job_id else None
    return pending if pending is not None and pending.action == "requeue" else None


def nodes_to_start_on(
    usable: tuple[str, ...], with_excluded: tuple[str, ...], needed: int, min_nodes: int | None
) -> tuple[str, ...]:
    """Return the usable nodes of a job, or all that live if too few of them are not excluded."""
    return usable if len(usable) >= min(needed, min_nodes or needed) else with_excluded


def returned_nodes(exclusions: Mapping[str, Exclusion], now: float) -> frozenset[str]:
    """Return the nodes whose exclusion has expired at `now` (UNIX seconds)."""
    return frozenset(node for node, exclusion in exclusions.items() if not exclusion.is_active(now))


def prefer_others(nodes: Sequence[str], returned: Collection[str], needed: int) -> tuple[str, ...]:
    """Return the nodes to choose those of the first ranks from.

    A node whose exclusion has expired is a spare at first, unless too few others are there.
    """
    others = [node for node in nodes if node not in returned]
    back = [node for node in nodes if node in returned]
    chosen = {*others, *back[: max(0, needed - len(others))]}
    return tuple(node for node in nodes if node in chosen)


HELD_S = 3600.0
"""Seconds for which a node is not used on which a former job's processes hold GPU memory."""


def nodes_to_skip(held: Mapping[str, str], nodes: int, needed: int, allowed: int) -> dict[str, str]:
    """Return the nodes that a job does not start on since a former job's processes hold GPU memory there.

    Args:
        held: nodes on which memory is held, with the reason.
        nodes: of the job. If memory is held on half of them, the site runs something on each, and none is skipped.
        needed: nodes of the ranks. Without a spare none is skipped: the memory may be free before ranks need it.
        allowed: how many may still be excluded; one is left for a fault to come.
    """
    is_few = 2 * len(held) < nodes and nodes - len(held) >= needed and len(held) < allowed
    return dict(held) if is_few else {}


def died_by_attempt(events: Sequence[Event]) -> dict[int, set[str]]:
    """Return the nodes that died, by the attempt in which they did."""
    died: dict[int, set[str]] = {}
    for event in events:
        if isinstance(event, FaultDetected) and event.kind == NODE_DEAD and event.node and event.attempt:
            died.setdefault(event.attempt, set()).add(event.node)
    return died


def why_lost(attempt: int, events: Sequence[Event], *, its_job: str, stepped: bool) -> str:
    """Describe what ended an attempt of an earlier start of a job before its supervisor could record its end.

    Args:
        attempt: its number.
        events: of the run, and what its users asked for.
        its_job: the job in which it ran; empty if that is the present one.
        stepped: it has finished a step.
    """
    starts = (event for event in events if isinstance(event, AttemptStarted) and event.attempt == attempt)
    began = next((event.time for event in starts), float("inf"))
    acted = next((e for e in events if isinstance(e, DeputyActed) and e.time >= began), None)
    if acted is not None:
        what = f"the supervisor was lost, and the agent on {acted.node} requeued the job"
    elif its_job:
        what = f"job {its_job} ended, and no supervisor recorded how"
    else:
        by = (event for event in events if isinstance(event, RequeuedByUser) and event.time >= began)
        user = next((action.user for action in by), None)
        what = f"the job was requeued {f'by {user}' if user else 'by Slurm or an administrator'}"
        what += " (zslurm requeue)" if user else " (scontrol requeue, a preemption, or its batch node died)"
    if stepped:
        return f"{what} before the end of the attempt was recorded"
    before = [event for event in events if isinstance(event, AttemptEnded) and event.attempt != attempt]
    if before and before[-1].cause:
        return f"{what} while the run recovered from: {before[-1].cause['message']}"
    return f"{what} before the attempt took a step"
