"""The events that change the state of a run, read without parsing the others.

A run of some weeks writes a million events, most of them about single ranks and sensors; `status` reads the files
of all runs. Lines of other kinds are passed over unparsed. The state-changing rows of a long file are kept in
state-events.json next to it, with the byte up to which they were read: only what was added since is read. The
supervisor keeps that record, so that the first `status` of many runs is as quick as the next.
From the events that change the state follow the last cause, the last decision and the excluded nodes.
"""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any, BinaryIO

from zslurm.core.files import read_json, write_atomically
from zslurm.run.events import (
    AttemptStarted,
    Decided,
    Ended,
    HelperJoined,
    HelperOver,
    HelperQueued,
    Preempted,
    RanksMoved,
    RecoveredInMemory,
    RunEnded,
    StartPostponed,
    SupervisorStarted,
)
from zslurm.run.events.event import CLASSES, Event, from_row
from zslurm.run.events.event_log import blocks_of_lines, damaged_lines, pattern_of_kinds, rows_of_kinds
from zslurm.run.exclusions import active_exclusions, exclusions_in
from zslurm.train.jsonl import lines_backwards, parse_line

_KINDS = frozenset(name for name, cls in CLASSES.items() if cls.CHANGES_STATE)
_PATTERN = pattern_of_kinds(_KINDS)
_LAST = 8
"""Lines at the end among which the newest event is looked for."""

WORTH_KEEPING = 1 << 20
"""Bytes that take as long to read again as a record takes to write."""
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
        damaged: lines that cannot be read; such a line may have been any event.
    """

    events: Sequence[Event] = ()
    newest: dict[str, Any] | None = None
    damaged: int = 0


def read_state_events(path: Path) -> StateEvents:
    """Read the state-changing events of `events.jsonl`; none if there is no such file."""
    try:
        rows, damaged = _read_rows(path)
    except FileNotFoundError:
        return StateEvents()
    last = (parse_line(line) for line in islice(lines_backwards(path), _LAST))
    newest = next((row for row in last if row is not None and row.get("role") != "advisory"), None)
    return StateEvents([from_row(row) for row in rows], newest or (rows[-1] if rows else None), damaged)


def keep_state_events(path: Path) -> None:
    """Bring the record next to `events.jsonl` up to date, if enough was added to it.

    Raises:
        OSError: the file cannot be read.
    """
    _read_rows(path)


def _read_rows(path: Path) -> tuple[list[dict[str, Any]], int]:
    """Return the state-changing rows, from the record and what was added since; keep them if that is much.

    The number counts damaged lines.
    """
    record = path.with_name("state-events.json")
    rows, damaged, begin = _kept_rows(record, path)
    with path.open("rb") as file:
        file.seek(begin)
        end = begin
        for block in blocks_of_lines(file):
            parsed = list(rows_of_kinds(block, _PATTERN))
            rows += [row for row in parsed if row is not None]
            damaged += damaged_lines(block) + parsed.count(None)
            end += len(block)
        if end - begin > WORTH_KEEPING:
            content = {"kinds": sorted(_KINDS), "offset": end, "ends": _ends(file, end), "damaged": damaged}
            content["rows"] = rows
            with contextlib.suppress(OSError):  # it only saves time: a full disk or a run of others has none
                write_atomically(record, json.dumps(content))
    return rows, damaged


def _kept_rows(record: Path, path: Path) -> tuple[list[dict[str, Any]], int, int]:
    """Return the rows of a record, the damaged lines and its end in the file; nothing if the file is another.

    A record of another version may lack kinds.
    """
    kept = read_json(record) or {}
    rows, offset, damaged = kept.get("rows"), kept.get("offset"), kept.get("damaged")
    if kept.get("kinds") != sorted(_KINDS) or not isinstance(rows, list):
        return [], 0, 0
    if not isinstance(offset, int) or offset < 0 or not isinstance(damaged, int):
        return [], 0, 0
    try:
        with path.open("rb") as file:
            same = _ends(file, offset) == kept.get("ends")
    except OSError:
        return [], 0, 0
    return ([row for row in rows if isinstance(row, dict)], damaged, offset) if same else ([], 0, 0)


def _ends(file: BinaryIO, offset: int) -> str:
    """Return the first and the last bytes before an offset, as text."""
    file.seek(0)
    first = file.read(min(_SAMPLE, offset))
    file.seek(max(0, offset - _SAMPLE))
    return (first + file.read(min(_SAMPLE, offset))).hex()


@dataclass(frozen=True)
class AegisView:
    """What Aegis noticed and did, as `status` shows it.

    Attributes:
        last_cause: the root of the last failure in this job: `message`, `attempt`, `time`, and where known
            `kind`, `rank`, `node`, `gpu`, `nic`, `step`, `exit_code`.
        last_decision: the newest event `decision` of this job, without the fields for a replay.
        excluded: nodes that the run does not use now.
        preempted: the event `preempted` of this job, if no attempt has started since.
        postponed: the newest event `start_postponed` of this job, if no ranks and no supervisor started since.
        restarts_in_place: how often the ranks were started again without Slurm's queue, in this job.
        recovered_in_memory: how often lost ranks were replaced while the others continued, in this job.
        planned_moves: how often ranks moved off a node at a step's boundary, in this job.
        helpers: the newest event, `helper_queued` or `helper_joined`, of each helper job that is not over.
    """

    last_cause: dict[str, Any] | None = None
    last_decision: dict[str, Any] | None = None
    excluded: tuple[str, ...] = ()
    preempted: dict[str, Any] | None = None
    postponed: dict[str, Any] | None = None
    restarts_in_place: int = 0
    recovered_in_memory: int = 0
    planned_moves: int = 0
    helpers: tuple[dict[str, Any], ...] = ()


def aegis_view(
    events: Sequence[Event], job_id: str, now: float | None = None, readmitted: Mapping[str, float] | None = None
) -> AegisView:
    """Return what the state-changing events show of a run's present job, and of its nodes now (UNIX seconds).

    `readmitted` are nodes that a person allowed again, and when.
    """
    own_events = [event for event in events if event.job_id == job_id]
    decisions = [event for event in own_events if isinstance(event, Decided)]
    return AegisView(
        last_cause=_last_cause(own_events),
        last_decision=without_replay_fields(decisions[-1].row) if decisions else None,
        preempted=_preempted(own_events),
        postponed=_postponed(own_events),
        excluded=tuple(active_exclusions(exclusions_in(events, readmitted), time.time() if now is None else now)),
        restarts_in_place=sum(decision.acted and decision.action in IN_PLACE for decision in decisions),
        recovered_in_memory=sum(isinstance(event, RecoveredInMemory) for event in own_events),
        planned_moves=sum(isinstance(event, RanksMoved) for event in own_events),
        helpers=_present_helpers(own_events),
    )


def _present_helpers(events: Iterable[Event]) -> tuple[dict[str, Any], ...]:
    """Return the newest event of each helper job that is not over."""
    present: dict[str, dict[str, Any]] = {}
    for event in events:
        if isinstance(event, HelperQueued | HelperJoined):
            present[event.helper] = event.row
        elif isinstance(event, HelperOver):
            present.pop(event.helper, None)
    return tuple(present.values())


def _preempted(events: Sequence[Event]) -> dict[str, Any] | None:
    """Return the preemption that the run has not come back from."""
    row: dict[str, Any] | None = None
    for event in events:
        if isinstance(event, Preempted):
            row = event.row
        elif isinstance(event, AttemptStarted):
            row = None
    return row


def _postponed(events: Sequence[Event]) -> dict[str, Any] | None:
    """Return why the ranks cannot be started; None if an attempt runs, or the reason was of an earlier start."""
    row: dict[str, Any] | None = None
    for event in events:
        if isinstance(event, StartPostponed):
            row = event.row
        elif isinstance(event, AttemptStarted | SupervisorStarted | RecoveredInMemory | RunEnded):
            row = None
    return row


_FOR_REPLAY = ("attempt_state", "resources")


def without_replay_fields(decision: Mapping[str, Any]) -> dict[str, Any]:
    """Return the row of a decision without the fields that only a replay of it needs."""
    return {name: value for name, value in decision.items() if name not in _FOR_REPLAY}


def _last_cause(events: Sequence[Event]) -> dict[str, Any] | None:
    """Return the cause of the newest failed attempt.

    The root that the decision after it names wins: it knows more.
    """
    cause: dict[str, Any] | None = None
    for event in events:
        cause_found: dict[str, Any] | None = None
        if isinstance(event, Ended):
            cause_found = event.cause
        elif isinstance(event, Decided) and event.root is not None:
            cause_found = {**event.root, "message": event.root.get("line") or event.root.get("kind")}
        if cause_found is None or not cause_found.get("message"):
            continue
        if isinstance(event, RunEnded) and cause is not None and cause["message"] == cause_found["message"]:
            continue  # it repeats the last attempt's
        names = ("message", "kind", "rank", "node", "gpu", "nic", "step", "exit_code")
        fields_known = {name: cause_found[name] for name in names if cause_found.get(name) is not None}
        attempt = event.row.get("attempt", cause["attempt"] if cause is not None else None)
        cause = fields_known | {"attempt": attempt, "time": event.row.get("time")}
    return cause
