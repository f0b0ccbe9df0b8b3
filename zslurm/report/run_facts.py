"""Everything that a report shows of one run, read from its directory; nothing here needs torch or a GPU.

A report can be made at any time: of an active run, of one that took no step, or whose files are damaged in part.
Lines that cannot be read are skipped and counted.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from zslurm.checkpoint_tools.format.layout import MANIFEST, step_of
from zslurm.config.spec import RunSpec
from zslurm.core.console import say
from zslurm.core.errors import ZslurmError
from zslurm.core.files import read_json
from zslurm.core.redact import redact, redact_mapping
from zslurm.report.efficiency import Efficiency, efficiency
from zslurm.report.timeline import Timeline, timeline
from zslurm.run.events import (
    Action,
    Decided,
    DeputyActed,
    FaultDetected,
    NodesExcluded,
    RecoveredInMemory,
    RecoveryFailed,
    RecoveryStarted,
    Requeued,
    RequeueFailed,
    Scored,
)
from zslurm.run.events.event import CLASSES, Event, from_row
from zslurm.run.events.event_log import kind_of
from zslurm.run.events.event_text import describe_cause
from zslurm.run.metrics.columns import Metrics, read_metrics
from zslurm.run.run_dir import RunDir
from zslurm.run.state.run_state import RunState, look_all
from zslurm.slurm.accounting import StepUsage
from zslurm.slurm.client import SlurmClient
from zslurm.train.jsonl import parse_line
from zslurm.train.sections.section import Section

MOST_EVENTS = 120
"""Events that a report lists, the newest ones."""


@dataclass(frozen=True)
class TimelineEntry:
    """Something that happened, as a report lists it.

    Attributes:
        time: UNIX seconds.
        attempt: if it belongs to one.
        sort: `fault`, `action`, `user` or `state`.
        text: a sentence.
    """

    time: float
    attempt: int | None
    sort: str
    text: str


@dataclass(frozen=True)
class SavedCheckpoint:
    """A checkpoint that was committed; `kept` while it is still there."""

    step: int
    time: float
    bytes: int
    seconds: float
    stall_s: float
    kept: bool
    best: bool


@dataclass(frozen=True)
class RunFacts:
    """One run.

    Attributes:
        run: its directory.
        state: what the launcher and its files say of it now.
        made: when this was read (UNIX seconds).
        metrics: what rank 0 measured.
        timeline: where the wall time went.
        happenings: faults and actions, oldest first; of many the newest.
        left_out: how many more there are.
        checkpoints: those that were committed.
        failed_saves: how many saves did not succeed.
        config: the resolved configuration without secrets; empty if it cannot be read.
        changed: its keys that are not the defaults, with their values.
        code: version of the code that the run was submitted with.
        routing: the matrices of the last evaluation's routing; empty if there are none.
        efficiency: what the job used of what it asked for.
        damaged_events: lines of the run's events that cannot be read.
        scored: scorings by hand, oldest first.
    """

    run: RunDir
    state: RunState
    made: float
    metrics: Metrics
    timeline: Timeline
    happenings: Sequence[TimelineEntry]
    left_out: int
    checkpoints: Sequence[SavedCheckpoint]
    failed_saves: int
    config: Mapping[str, Any]
    changed: Mapping[str, Any]
    code: Mapping[str, Any]
    routing: Mapping[str, Any]
    efficiency: Efficiency
    damaged_events: int
    scored: Sequence[Scored] = ()

    @property
    def cause(self) -> str:
        """The root of the run's failure in one line, or of one that it survived; empty if there is none."""
        present = self.state.present_cause
        cause = present or self.state.aegis.last_cause
        if not cause or not cause.get("message"):
            return ""
        return f"{'' if present else 'last failure: '}{redact(describe_cause(cause))}"


def read_runs(runs: Sequence[RunDir]) -> list[RunFacts]:
    """Read what a report shows of each run, with one question to Slurm's controller for all.

    Raises:
        ZslurmError: a file cannot be read.
    """
    return [_read(run, state) for run, state in zip(runs, look_all(runs, cached=True), strict=True)]


def _read(run: RunDir, state: RunState) -> RunFacts:
    made = time.time()
    metrics = read_metrics(run.path)
    events, damaged = _events(run)
    line = timeline(events, metrics, now=made if state.active else None)
    happened = [happening for event in events if (happening := _happening(event)) is not None]
    config = redact_mapping(read_json(run.config) or {})
    saved = list(_checkpoints(run, metrics))
    return RunFacts(
        run=run,
        state=state,
        made=made,
        metrics=metrics,
        timeline=line,
        happenings=happened[-MOST_EVENTS:],
        left_out=max(0, len(happened) - MOST_EVENTS),
        checkpoints=saved,
        failed_saves=sum(row.get("state") == "FAILED" for row in metrics.rows("checkpoint")),
        config=config,
        changed=dict(_not_default(RunSpec, config)),
        code=read_json(run.code) or {},
        routing=read_json(run.routing) or {},
        efficiency=efficiency(
            run, config, metrics, line, [save.bytes for save in saved if save.kept], _accounting(state, line)
        ),
        damaged_events=damaged,
        scored=[event for event in events if isinstance(event, Scored)],
    )


def _accounting(state: RunState, line: Timeline) -> list[StepUsage]:
    """Return what Slurm's accounting has of a run's jobs; nothing if there is none, or it does not answer."""
    if state.launcher != "slurm" or state.state == "copied":
        return []
    jobs = sorted({attempt.job_id for attempt in line.attempts if attempt.job_id})
    try:
        return SlurmClient().usage(jobs)
    except ZslurmError as error:
        say(f"report: the figures of Slurm's accounting are left out: {error}")
        return []


def _events(run: RunDir) -> tuple[list[Event], int]:
    """Return what a report shows of a run's events and of what people did, and how many lines are damaged.

    Of a run of some weeks most events are about single ranks, and are not parsed.
    """
    rows: list[dict[str, Any]] = []
    damaged = 0
    for path in (run.submissions, run.events):
        try:
            with path.open("rb") as file:
                for line in file:
                    if _is_left_out(line):
                        continue
                    row = parse_line(line)
                    if row is not None:
                        rows.append(row)
                    elif line.endswith(b"\n") and line.strip():
                        damaged += 1
        except FileNotFoundError:
            continue
        except OSError as error:
            raise ZslurmError(f"{path}: cannot be read: {error.strerror or error}") from error
    rows.sort(key=lambda row: float(row.get("time") or 0.0))
    return [from_row(row) for row in rows], damaged


def _happening(event: Event) -> TimelineEntry | None:
    """Return an event as the report lists it; None for events of sensors, agents and single ranks."""
    if isinstance(event, FaultDetected):
        sort = "fault" if event.role == "root" and not event.cleared else ""
    elif isinstance(event, Action):
        sort = "user"
    elif isinstance(event, _ACTIONS):
        sort = "action"
    else:
        sort = "state" if event.CHANGES_STATE else ""
    return TimelineEntry(event.time, event.attempt, sort, redact(event.describe())) if sort else None


def _is_left_out(line: bytes) -> bool:
    """Return whether a whole line is an event that a report does not show, by its beginning."""
    kind = kind_of(line)
    if kind is None or not line.endswith(b"}\n"):
        return False
    if kind == _FAULT:
        return b'"root"' not in line
    return kind not in _SHOWN


_ACTIONS = (
    Decided,
    DeputyActed,
    NodesExcluded,
    RecoveredInMemory,
    RecoveryFailed,
    RecoveryStarted,
    RequeueFailed,
    Requeued,
)
_FAULT = FaultDetected.NAME.encode()
_SHOWN = frozenset(
    name.encode() for name, cls in CLASSES.items() if cls.CHANGES_STATE or issubclass(cls, _ACTIONS)
)


def _checkpoints(run: RunDir, metrics: Metrics) -> Iterator[SavedCheckpoint]:
    """Yield the checkpoints that were committed, oldest first; a step that was saved twice counts once."""
    steps_on_disk = {step_of(path.parent.name) for path in run.checkpoints.glob(f"*/{MANIFEST}")}
    rows = {
        row["step"]: row
        for row in metrics.rows("checkpoint")
        if row.get("state") == "COMMITTED" and isinstance(row.get("step"), int)
    }
    best = next(
        (row.get("best_step") for row in reversed(rows.values()) if row.get("best_step") is not None), None
    )
    for step, row in rows.items():
        numbers = {name: _number(row.get(name)) for name in ("time", "bytes", "seconds", "stall_s")}
        yield SavedCheckpoint(
            step, numbers["time"], int(numbers["bytes"]), numbers["seconds"], numbers["stall_s"],
            kept=step in steps_on_disk, best=step == best,
        )  # fmt: skip


def _number(value: object) -> float:
    return float(value) if isinstance(value, int | float) and not isinstance(value, bool) else 0.0


def _not_default(section: type[Section], values: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the keys of a configuration whose values are not the defaults, nested ones with dots."""
    for name, value in values.items():
        field = section.model_fields.get(name)
        kind = field.annotation if field is not None else None
        if isinstance(kind, type) and issubclass(kind, Section) and isinstance(value, dict):
            yield from _not_default(kind, value, f"{prefix}{name}.")
        elif field is None or value != _as_json(field.get_default(call_default_factory=True)):
            yield from flat(value, f"{prefix}{name}")


def _as_json(value: Any) -> Any:
    if isinstance(value, Section):
        return value.model_dump(mode="json")
    return list(value) if isinstance(value, tuple) else value


def flat(value: Any, name: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the single values in nested mappings and lists: `phases[0].lr` and 3e-4."""
    if isinstance(value, dict) and value:
        for key, inner in value.items():
            yield from flat(inner, f"{name}.{key}" if name else str(key))
    elif isinstance(value, list) and any(isinstance(inner, dict) for inner in value):
        for index, inner in enumerate(value):
            yield from flat(inner, f"{name}[{index}]")
    else:
        yield name, value
