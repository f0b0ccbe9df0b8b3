"""What the run went through, read back from its events; and what the policy asks of it.

The events file is the only memory that outlives supervisors, jobs and nodes. It is read as it is found: rows of
other versions, of unknown kinds or with fields missing are passed over, never guessed at.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any, get_args

from zslurm.aegis.types import Action, Exclusion, Fault, History, Incident, Role, Scope
from zslurm.config.aegis import AegisSection
from zslurm.slurm.hostlist import HostlistError, expand

_ENDS: tuple[Action, ...] = ("finish", "stop")
NOTHING_SAVED = -1


def history_of(events: Iterable[Mapping[str, Any]]) -> History:
    """The history of a run.

    An incident is a decision that was acted on. Where the decision does not say what had been saved, nothing more
    counts as saved than before.

    Args:
        events: rows of events.jsonl, oldest first.
    """
    incidents: list[Incident] = []
    exclusions: list[Exclusion] = []
    starts: list[float] = []
    saved = NOTHING_SAVED
    for row in events:
        when = row.get("time")
        if not isinstance(when, int | float):
            continue
        kind = row.get("event")
        if kind == "attempt_started":
            starts.append(float(when))
        elif kind == "nodes_excluded":
            exclusions.extend(Exclusion(node, float(when), str(row.get("reason", ""))) for node in nodes_in(row))
        elif kind == "decision" and row.get("mode", "act") == "act" and row.get("action") in get_args(Action):
            incident = _incident(row, float(when), saved)
            saved = incident.committed_step
            incidents.append(incident)
            known = {exclusion.node for exclusion in exclusions if exclusion.since >= when}
            reason = str(row.get("reason", ""))
            exclusions.extend(
                Exclusion(node, float(when), reason) for node in incident.excluded if node not in known
            )
    return History(tuple(incidents), tuple(exclusions), tuple(starts))


def _incident(row: Mapping[str, Any], when: float, saved: int) -> Incident:
    step, attempt, excluded = row.get("committed_step"), row.get("attempt"), row.get("exclude")
    return Incident(
        time=when,
        attempt=attempt if isinstance(attempt, int) else 0,
        action=row["action"],
        root=fault_in(row.get("root")),
        committed_step=step if isinstance(step, int) else saved,
        excluded=tuple(map(str, excluded)) if isinstance(excluded, list | tuple) else (),
    )


def fault_in(value: object) -> Fault | None:
    """A fault from an event; None where there is none, or what is there cannot be one."""
    if not isinstance(value, Mapping):
        return None
    kinds: dict[str, Any] = {"time": int | float, "rank": int | None, "step": int | None}
    text = (*("kind", "source", "line"), *("node", "gpu", "nic", "fingerprint"))
    kinds |= {name: str if name in text[:3] else str | None for name in text}
    known = value.get("role") in get_args(Role) and value.get("scope") in get_args(Scope)
    if not known or not all(isinstance(value.get(name), kind) for name, kind in kinds.items()):
        return None
    return Fault.of(value)


def nodes_in(row: Mapping[str, Any]) -> list[str]:
    """The nodes of an event: a list of names, or one text as Slurm writes them."""
    nodes = row.get("nodes")
    if isinstance(nodes, list | tuple):
        return [str(node) for node in nodes]
    try:
        return expand(nodes) if isinstance(nodes, str) else []
    except HostlistError:
        return []


def active_exclusions(history: History, now: float, settings: AegisSection) -> dict[str, Exclusion]:
    """The nodes that must not be used now, each with its newest exclusion; expired ones are gone."""
    return {
        exclusion.node: exclusion
        for exclusion in history.exclusions
        if exclusion.since + settings.exclude_for_s > now
    }


def since_last_end(history: History) -> Iterator[Incident]:
    """Incidents since the run last finished or stopped, newest first: who submits it again starts afresh."""
    for incident in reversed(history.incidents):
        if incident.action in _ENDS:
            return
        yield incident


def without_progress(history: History, committed_step: int) -> list[Incident]:
    """Incidents since the newest checkpoint, oldest first, without those that excluded a node.

    An exclusion has removed its cause, so it does not speak against trying again; it has a limit of its own.
    """
    stuck = [incident for incident in since_last_end(history) if incident.committed_step >= committed_step]
    return [incident for incident in reversed(stuck) if not incident.excluded]


def starts_since(history: History, since: float) -> int:
    """Attempts that were started after `since`, and after the run last finished or stopped."""
    ends = [incident.time for incident in history.incidents if incident.action in _ENDS]
    return sum(1 for start in history.starts if start > max([since, *ends]))


def blamed_before(history: History, node: str, since: float) -> list[Fault]:
    """The roots of earlier attempts on one node, oldest first."""
    return [
        incident.root
        for incident in history.incidents
        if incident.root is not None and incident.root.node == node and incident.time > since
    ]
