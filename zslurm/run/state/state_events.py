"""The events that change the state of a run, read without parsing the others.

A run of some weeks writes a million events, most of them about single ranks and sensors; `status` reads the files
of all runs. Of an ordinary line only the kind is read. Of a long file only what was added since this user looked
last is read: the state-changing rows before that are kept in the user's state directory. From the events that
change the state follow the last cause, the last decision and the excluded nodes.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any, BinaryIO

from zslurm.core.files import read_json, write_atomically
from zslurm.run.events import (
    AttemptStarted,
    Decided,
    Ended,
    Preempted,
    RanksMoved,
    RecoveredInMemory,
    RunEnded,
    StartPostponed,
    SupervisorStarted,
)
from zslurm.run.events.event import CLASSES, Event, from_row
from zslurm.run.events.event_log import kind_of
from zslurm.run.exclusions import active_exclusions, exclusions_in
from zslurm.run.index import state_dir
from zslurm.train.jsonl import lines_backwards, parse_line

_KINDS = frozenset(name.encode() for name, cls in CLASSES.items() if cls.CHANGES_STATE)
_KINDS_READ = sorted(kind.decode() for kind in _KINDS)
"""The kinds of a record's rows: a record of another version may lack some."""
_LAST = 8
"""Lines at the end among which the newest event is looked for."""

_WORTH_KEEPING = 1 << 20
"""Bytes that take as long to read again as a kept record takes to write."""
_KEPT_S = 30 * 86400.0
"""A record that nobody has written for so long is removed."""
_SAMPLE = 128
"""Bytes at both ends of what was read that show whether the file is still the same."""

IN_PLACE = ("restart", "swap", "shrink")
"""Actions that start the ranks again in the same job."""


@dataclass(frozen=True)
class StateEvents:
    """The events that change the state of a run.

    Attributes:
        events: oldest first.
        newest: the row of the newest event, advisory faults excepted: a healthy run has many of them.
    """

    events: Sequence[Event] = ()
    newest: dict[str, Any] | None = None


def read_state_events(path: Path) -> StateEvents:
    """Read the state-changing events of `events.jsonl`; none if there is no such file. Skip damaged lines."""
    record = _record_file(path)
    rows, offset = _kept_rows(record, path)
    begin = offset
    try:
        with path.open("rb") as file:
            file.seek(offset)
            for line in file:
                if not line.endswith(b"\n"):
                    break
                offset += len(line)
                kind = kind_of(line)
                if (kind is None or kind in _KINDS) and (row := parse_line(line)) is not None and "event" in row:
                    rows.append(row)
            if offset - begin > _WORTH_KEEPING:
                content = {"kinds": _KINDS_READ, "offset": offset, "ends": _ends(file, offset), "rows": rows}
                _keep_rows(record, content)
    except FileNotFoundError:
        return StateEvents()
    last = (parse_line(line) for line in islice(lines_backwards(path), _LAST))
    newest = next((row for row in last if row is not None and row.get("role") != "advisory"), None)
    return StateEvents([from_row(row) for row in rows], newest or (rows[-1] if rows else None))


def _record_file(path: Path) -> Path:
    name = hashlib.sha256(os.fsencode(path.absolute())).hexdigest()[:32]
    return state_dir() / "events" / f"{name}.json"


def _kept_rows(record: Path, path: Path) -> tuple[list[dict[str, Any]], int]:
    """Return the rows of a record and the byte of the file at which it ends; nothing if it is of another file."""
    kept = read_json(record) or {}
    rows, offset = kept.get("rows"), kept.get("offset")
    if not (isinstance(rows, list) and isinstance(offset, int)) or kept.get("kinds") != _KINDS_READ:
        return [], 0
    try:
        with path.open("rb") as file:
            same = _ends(file, offset) == kept.get("ends")
    except OSError:
        return [], 0
    return ([row for row in rows if isinstance(row, dict)], offset) if same else ([], 0)


def _ends(file: BinaryIO, offset: int) -> str:
    """Return the first and the last bytes before an offset, as text."""
    file.seek(0)
    first = file.read(min(_SAMPLE, offset))
    file.seek(max(0, offset - _SAMPLE))
    return (first + file.read(min(_SAMPLE, offset))).hex()


def _keep_rows(record: Path, content: dict[str, Any]) -> None:
    """Write a record, which only saves time: without room or permission there is none."""
    with contextlib.suppress(OSError):
        record.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(record, json.dumps(content), private=True)
        for other in record.parent.glob("*.json"):
            if time.time() - other.stat().st_mtime > _KEPT_S:
                other.unlink(missing_ok=True)


@dataclass(frozen=True)
class AegisView:
    """What Aegis noticed and did, as `status` shows it.

    Attributes:
        last_cause: the root of the last failure in this job: `message`, `attempt`, `time`, and where known
            `kind`, `rank`, `node`, `gpu`, `nic`, `step`, `exit_code`.
        last_decision: the newest event `decision` of this job, without the fields for a replay.
        excluded: nodes that the run does not use now.
        preempted: the event `preempted` of this job, where no attempt has started since.
        postponed: the newest event `start_postponed` of this job, if no ranks and no supervisor started since.
        restarts_in_place: how often the ranks were started again without Slurm's queue, in this job.
        recovered_in_memory: how often lost ranks were replaced while the others continued, in this job.
        planned_moves: how often ranks moved off a node at a step's boundary, in this job.
    """

    last_cause: dict[str, Any] | None = None
    last_decision: dict[str, Any] | None = None
    excluded: tuple[str, ...] = ()
    preempted: dict[str, Any] | None = None
    postponed: dict[str, Any] | None = None
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
        postponed=_postponed(mine),
        excluded=tuple(active_exclusions(exclusions_in(events, readmitted), time.time() if now is None else now)),
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


def _postponed(events: Sequence[Event]) -> dict[str, Any] | None:
    """Return why the ranks cannot be started; None if an attempt runs, or the reason was of an earlier start."""
    found: dict[str, Any] | None = None
    for event in events:
        if isinstance(event, StartPostponed):
            found = event.row
        elif isinstance(event, AttemptStarted | SupervisorStarted | RecoveredInMemory | RunEnded):
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
