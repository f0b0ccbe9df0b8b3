"""What the run went through, read back from its events; and what the policy asks of it.

The events file is the only memory that outlives supervisors, jobs and nodes. It is read as it is found: rows of
other versions, of unknown kinds or with fields missing are passed over, never guessed at.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any, cast, get_args

from zslurm.aegis.types import Action, Fault, History, Incident, Role, Scope
from zslurm.run.events import (
    AttemptStarted,
    Decided,
    ExcludedByUser,
    FaultDetected,
    HelperJoined,
    NodesExcluded,
    NodesReadmitted,
    Readmitted,
    Requeued,
    RequeuedByUser,
)
from zslurm.run.events.event import Event, select
from zslurm.run.events.event_text import node_names
from zslurm.run.exclusions import exclusions_in

_ENDS: tuple[Action, ...] = ("finish", "stop")
NOTHING_SAVED = -1
_KINDS: tuple[type[Event], ...] = (
    AttemptStarted, NodesExcluded, NodesReadmitted, Decided, Requeued, Readmitted, ExcludedByUser, RequeuedByUser,
    HelperJoined,
)  # fmt: skip


def history_of(events: Iterable[Mapping[str, Any]]) -> History:
    """Return the history of a run from the rows of events.jsonl, oldest first, and of submissions.jsonl.

    An incident is a decision that was acted on; without a `committed_step`, the one before it counts.
    """
    incidents: list[Incident] = []
    readmitted: dict[str, float] = {}
    excluded_by_person: dict[str, float] = {}
    starts: list[float] = []
    waits: list[float] = []
    helper_waits: list[float] = []
    requeued: Requeued | None = None
    saved = NOTHING_SAVED
    selected = list(select(events, *_KINDS))
    for event in selected:
        if "time" not in vars(event):  # damaged
            continue
        if isinstance(event, AttemptStarted):
            starts.append(event.time)
            if requeued is not None and requeued.job_id == event.job_id:  # else it was submitted again later
                waits.append(event.time - requeued.time)
            requeued = None
        elif isinstance(event, Requeued):
            requeued = event
        elif isinstance(event, HelperJoined):
            helper_waits += [] if event.waited_s is None else [event.waited_s]
        elif isinstance(event, Readmitted | NodesReadmitted):
            readmitted |= dict.fromkeys(node_names(event.nodes), event.time)
        elif isinstance(event, ExcludedByUser | RequeuedByUser) and event.excluded:
            excluded_by_person |= dict.fromkeys(node_names(event.excluded), event.time)
        elif isinstance(event, Decided) and event.acted and event.action in get_args(Action):
            incident = _incident(event, saved)
            saved = incident.committed_step
            incidents.append(incident)
    allowed = {node for node, when in readmitted.items() if when > excluded_by_person.get(node, -1.0)}
    return History(
        tuple(incidents),
        exclusions_in(selected),
        tuple(starts),
        tuple(waits),
        tuple(helper_waits),
        frozenset(allowed),
    )


def _incident(event: Decided, saved: int) -> Incident:
    return Incident(
        time=event.time,
        attempt=event.attempt or 0,
        action=cast(Action, event.action),
        root=fault_in(event.root),
        committed_step=saved if event.committed_step is None else event.committed_step,
        excluded=tuple(event.exclude or ()),
    )


def fault_in(value: object) -> Fault | None:
    """Return a fault from an event; None if there is none, or what is there cannot be one."""
    if not isinstance(value, Mapping):
        return None
    kinds: dict[str, Any] = {"time": int | float, "rank": int | None, "step": int | None}
    text = (*("kind", "source", "line"), *("node", "gpu", "nic", "fingerprint"))
    kinds |= {name: str if name in text[:3] else str | None for name in text}
    is_fault = value.get("role") in get_args(Role) and value.get("scope") in get_args(Scope)
    if not is_fault or not all(isinstance(value.get(name), kind) for name, kind in kinds.items()):
        return None
    return Fault.of(value)


def fault_of(event: FaultDetected) -> Fault | None:
    """Return the fault of an event, whose own `time` is the record's; None if it is damaged."""
    row = event.row
    return fault_in({**row, "time": row.get("fault_time", row.get("time"))})


def since_last_end(history: History) -> Iterator[Incident]:
    """Incidents since the run last finished or stopped, newest first: a new submission starts afresh."""
    for incident in reversed(history.incidents):
        if incident.action in _ENDS:
            return
        yield incident


def without_progress(history: History, committed_step: int) -> list[Incident]:
    """Incidents since the newest checkpoint, oldest first, without those that excluded a node.

    An exclusion has removed its cause, so it is no reason against trying again; it has a separate limit.
    """
    stuck = [incident for incident in since_last_end(history) if incident.committed_step >= committed_step]
    return [incident for incident in reversed(stuck) if not incident.excluded]


def starts_since(history: History, since: float) -> int:
    """Return the attempts that were started after `since`, and after the run last finished or stopped."""
    ends = [incident.time for incident in history.incidents if incident.action in _ENDS]
    return sum(1 for start in history.starts if start > max([since, *ends]))


def roots_before(history: History, node: str, since: float) -> list[Fault]:
    """Return the roots of earlier attempts on one node, oldest first."""
    return [
        incident.root
        for incident in history.incidents
        if incident.root is not None and incident.root.node == node and incident.time > since
    ]
