"""The events that change the state of a run, read without parsing the others.

A run of some weeks writes tens of thousands of events, most of them about single ranks and sensors; `status` reads
the files of all runs. Of an ordinary line only the kind is read. From the events that change the state follow the
last cause, the last decision and the excluded nodes.
"""

from __future__ import annotations

import re
import time
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from zslurm.run.events import (
    AttemptStarted,
    Decided,
    Ended,
    ExclusionFailed,
    NodesExcluded,
    Preempted,
    RanksMoved,
    RecoveredInMemory,
    RunEnded,
)
from zslurm.run.events.event import CLASSES, Event, from_row
from zslurm.run.events.event_text import node_names
from zslurm.train.jsonl import parse_line

_KINDS = frozenset(name.encode() for name, cls in CLASSES.items() if cls.CHANGES_STATE)
_EVENT = re.compile(rb'"event":\s?"(\w+)"')
_HEAD = 200
"""The kind is one of the first fields of a line."""
_LAST = 8

IN_PLACE = ("restart", "swap", "shrink")
"""Actions that start the ranks again in the same job."""


@dataclass(frozen=True)
class StateEvents:
    """The events that change the state of a run.

    Attributes:
        events: oldest first.
        newest: the row of the newest event of any kind.
    """

    events: Sequence[Event] = ()
    newest: dict[str, Any] | None = None


def read_state_events(path: Path) -> StateEvents:
    """Read the state-changing events of `events.jsonl`; none where there is no such file. Skip damaged lines."""
    events: list[Event] = []
    last: deque[bytes] = deque(maxlen=_LAST)
    try:
        with path.open("rb") as file:
            for line in file:
                last.append(line)
                kind = _EVENT.search(line, 0, _HEAD)
                if (
                    (kind is None or kind[1] in _KINDS)
                    and (row := parse_line(line)) is not None
                    and "event" in row
                ):
                    events.append(from_row(row))
    except FileNotFoundError:
        return StateEvents()
    newest = next((row for line in reversed(last) if (row := parse_line(line)) is not None), None)
    return StateEvents(events, newest)


@dataclass(frozen=True)
class AegisView:
    """What Aegis noticed and did, as `status` shows it.

    Attributes:
        last_cause: the root of the last failure in this job: `message`, `attempt`, `time`, and where known
            `kind`, `rank`, `node`, `gpu`, `nic`, `step`, `exit_code`.
        last_decision: the newest event `decision` of this job, without the fields for a replay.
        excluded: nodes that the run does not use now.
        preempted: the event `preempted` of this job, where no attempt has started since.
        restarts_in_place: how often the ranks were started again without Slurm's queue, in this job.
        recovered_in_memory: how often lost ranks were replaced while the others continued, in this job.
        planned_moves: how often ranks moved off a node at a step's boundary, in this job.
    """

    last_cause: dict[str, Any] | None = None
    last_decision: dict[str, Any] | None = None
    excluded: tuple[str, ...] = ()
    preempted: dict[str, Any] | None = None
    restarts_in_place: int = 0
    recovered_in_memory: int = 0
    planned_moves: int = 0


def aegis_view(
    events: Sequence[Event], job_id: str, now: float | None = None, readmitted: Mapping[str, float] | None = None
) -> AegisView:
    """Return what the state-changing events show of a run's present job, and of its nodes now (UNIX seconds).

    `readmitted` are nodes that a person allowed again, and when.
    """
    mine = [event for event in events if event.job_id == job_id]
    decisions = [event for event in mine if isinstance(event, Decided)]
    return AegisView(
        last_cause=_last_cause(mine),
        last_decision=without_replay_fields(decisions[-1].row) if decisions else None,
        preempted=_preempted(mine),
        excluded=_excluded(events, job_id, time.time() if now is None else now, readmitted or {}),
        restarts_in_place=sum(decision.acted and decision.action in IN_PLACE for decision in decisions),
        recovered_in_memory=sum(isinstance(event, RecoveredInMemory) for event in mine),
        planned_moves=sum(isinstance(event, RanksMoved) for event in mine),
    )


def _preempted(events: Sequence[Event]) -> dict[str, Any] | None:
    """The preemption that the run has not come back from."""
    found: dict[str, Any] | None = None
    for event in events:
        if isinstance(event, Preempted):
            found = event.row
        elif isinstance(event, AttemptStarted):
            found = None
    return found


_FOR_REPLAY = ("attempt_state", "situation", "resources")


def without_replay_fields(decision: Mapping[str, Any]) -> dict[str, Any]:
    """Return the row of a decision without the fields that only a replay of it needs."""
    return {name: value for name, value in decision.items() if name not in _FOR_REPLAY}


def _last_cause(events: Sequence[Event]) -> dict[str, Any] | None:
    """The cause of the newest failed attempt; the root that the decision after it names wins: it knows more."""
    cause: dict[str, Any] | None = None
    for event in events:
        found: dict[str, Any] | None = None
        if isinstance(event, Ended):
            found = event.cause
        elif isinstance(event, Decided) and event.root is not None:
            found = {**event.root, "message": event.root.get("line") or event.root.get("kind")}
        if found is None or not found.get("message"):
            continue
        if isinstance(event, RunEnded) and cause is not None and cause["message"] == found["message"]:
            continue  # it repeats the last attempt's
        names = ("message", "kind", "rank", "node", "gpu", "nic", "step", "exit_code")
        known = {name: found[name] for name in names if found.get(name) is not None}
        attempt = event.row.get("attempt", cause["attempt"] if cause is not None else None)
        cause = known | {"attempt": attempt, "time": event.row.get("time")}
    return cause


def _excluded(
    events: Sequence[Event], job_id: str, now: float, readmitted: Mapping[str, float]
) -> tuple[str, ...]:
    """Nodes whose exclusion has not expired; one without an end holds for the job that excluded them."""
    until: dict[str, float] = {}
    for event in events:
        if isinstance(event, NodesExcluded):
            expires = event.expires
            if expires is None:
                expires = float("inf") if event.job_id == job_id else 0.0
            nodes = [node for node in node_names(event.nodes) if event.time > readmitted.get(node, -1.0)]
            until |= dict.fromkeys(nodes, expires)
        elif isinstance(event, ExclusionFailed):
            until |= dict.fromkeys(node_names(event.nodes), 0.0)
    return tuple(node for node, end in until.items() if end > now)
