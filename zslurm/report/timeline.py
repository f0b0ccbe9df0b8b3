"""Where a run's wall time went: its attempts, the parts of each, and goodput.

Goodput is the share of wall time that became kept steps. Wall time counts from a submission to the run's end, and
again from the next submission: while a stopped run waits to be submitted, no time passes. What
is known: when attempts started and ended (events.jsonl), and when every step ended and how long it took
(metrics.jsonl). Everything else is the time between these.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise, zip_longest
from typing import TYPE_CHECKING, Any

from zslurm.run.events import (
    AttemptEnded,
    AttemptStarted,
    Cancelled,
    DeputyActed,
    RecoveredInMemory,
    Requeued,
    RequeuedByUser,
    RunEnded,
    Submitted,
    SupervisorStarted,
)
from zslurm.run.events.event import Event
from zslurm.run.metrics.columns import Metrics

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

PARTS = {
    "steps": "kept steps",
    "checkpoint": "standing still for checkpoints",
    "lost": "steps that were lost and taken again",
    "start": "starting: until the first step begins",
    "recovery": "recovering in memory",
    "between": "between steps: evaluations, and what else is no step's",
    "end": "after the last step: saving, noticing the fault, ending the ranks",
    "down": "between attempts",
    "queue": "waiting in the queue",
}
"""Parts of the wall time, and what each is."""


@dataclass(frozen=True)
class TimeSpan:
    """A part of the wall time without a break, in UNIX seconds."""

    part: str
    begin: float
    end: float
    attempt: int | None = None

    @property
    def seconds(self) -> float:
        """How long it was."""
        return self.end - self.begin


@dataclass
class Attempt:
    """One start of the ranks.

    Attributes:
        number: from 1.
        began, ended: UNIX seconds; `ended` is the last sign of life if no end was recorded.
        outcome: `running` while it runs, `no end recorded` if nothing is known.
        cause: the root of a failure, if it was recorded.
        first_step, last_step: of its steps; None if it took none.
        kept, lost: how many of its steps were kept, and how many were taken again later.
        seconds: of each part that belongs to it.
    """

    number: int
    began: float
    ended: float
    outcome: str
    job_id: str = ""
    nodes: str = ""
    world_size: int | None = None
    exit_code: int | None = None
    cause: dict[str, Any] | None = None
    first_step: int | None = None
    last_step: int | None = None
    kept: int = 0
    lost: int = 0
    seconds: dict[str, float] = field(default_factory=dict)
    spans: list[TimeSpan] = field(default_factory=list)


@dataclass(frozen=True)
class Timeline:
    """A run's wall time.

    Attributes:
        attempts: by number.
        spans: what the run was doing when, oldest first; steps and what interrupts them are one span.
        seconds: of each part of `PARTS`.
    """

    attempts: Sequence[Attempt]
    spans: Sequence[TimeSpan]
    seconds: Mapping[str, float]

    @property
    def wall_s(self) -> float:
        """Seconds in all."""
        return sum(self.seconds.values())

    @property
    def goodput(self) -> float | None:
        """The share of the time on its nodes that became kept steps; None before there was any."""
        on_nodes = self.wall_s - self.seconds.get("queue", 0.0)
        return self.seconds.get("steps", 0.0) / on_nodes if on_nodes > 0 else None

    @property
    def goodput_with_queue(self) -> float | None:
        """The same of all wall time, the queue included."""
        return self.seconds.get("steps", 0.0) / self.wall_s if self.wall_s > 0 else None

    @property
    def failures(self) -> int:
        """How many attempts ended neither as they should nor on request."""
        return sum(attempt.outcome not in _ORDERLY for attempt in self.attempts)


_ORDERLY = ("completed", "interrupted", "running")
_MARKS = (
    *(Submitted, AttemptStarted, AttemptEnded, RunEnded, Requeued, RequeuedByUser, Cancelled),
    *(DeputyActed, SupervisorStarted),
)


def timeline(events: Sequence[Event], metrics: Metrics, *, now: float | None = None) -> Timeline:
    """Account for a run's time.

    Args:
        events: of the run and of its users, oldest first.
        metrics: of the run.
        now: UNIX seconds while the run is active, so that its last attempt has not ended; None if it rests.
    """
    marks = [event for event in events if isinstance(event, _MARKS) and event.time]
    recovered: dict[int, float] = {}
    for event in events:
        if isinstance(event, RecoveredInMemory):
            recovered[event.attempt] = recovered.get(event.attempt, 0.0) + (event.seconds or 0.0)
    attempts = _attempts(marks, metrics, now)
    for attempt in attempts:
        _measure(attempt, metrics, recovered.get(attempt.number, 0.0))
    waits = _waits(marks, attempts, now)
    seconds = dict.fromkeys(PARTS, 0.0)
    for attempt in attempts:
        for time_part, value in attempt.seconds.items():
            seconds[time_part] += value
    for span in waits:
        seconds[span.part] += span.seconds
    spans = sorted(
        [*waits, *(span for attempt in attempts for span in attempt.spans)], key=lambda span: span.begin
    )
    return Timeline(attempts, spans, {time_part: value for time_part, value in seconds.items() if value > 0})


def _attempts(marks: Sequence[Event], metrics: Metrics, now: float | None) -> list[Attempt]:
    """Return every attempt of which an event or a step is left, with when it began and ended."""
    by_number: dict[int, Attempt] = {}
    for event in marks:
        if isinstance(event, AttemptStarted):
            by_number[event.attempt] = Attempt(
                event.attempt, event.time, math.nan, "", event.job_id, event.node_list if event.nodes else "",
                event.world_size,
            )  # fmt: skip
        elif isinstance(event, AttemptEnded) and event.attempt in by_number:
            attempt = by_number[event.attempt]
            attempt.ended, attempt.outcome = event.time, event.outcome
            attempt.exit_code, attempt.cause = event.exit_code, event.cause
    times, numbers = metrics.all_steps.get("time"), metrics.all_steps.get("attempt")
    if times is not None and numbers is not None:
        for number in sorted(set(numbers.astype(int)) - {0}):
            own_times = times[numbers == number]
            if number not in by_number:
                first = float(own_times[0]) - float(metrics.all_steps["step_time_s"][numbers == number][0])
                by_number[number] = Attempt(number, first, math.nan, "")
            if math.isnan(by_number[number].ended):
                by_number[number].ended = float(own_times[-1])
    ordered = [by_number[number] for number in sorted(by_number)]
    for attempt, following in zip_longest(ordered, ordered[1:]):
        if attempt.outcome:
            continue
        if following is None and now is not None:
            attempt.outcome, attempt.ended = "running", max(now, attempt.began)
        else:
            attempt.outcome = "no end recorded"
            attempt.ended = attempt.began if math.isnan(attempt.ended) else max(attempt.ended, attempt.began)
    return ordered


def _measure(attempt: Attempt, metrics: Metrics, recovery_s: float) -> None:
    """Divide an attempt's time into parts."""
    rows, own_rows = metrics.all_steps, None
    if "attempt" in rows and {"time", "step_time_s"} <= rows.keys():
        own_rows = (rows["attempt"] == attempt.number) & ~_is_nan(rows["time"]) & ~_is_nan(rows["step_time_s"])
    if own_rows is None or not own_rows.any():
        attempt.seconds = {"start": attempt.ended - attempt.began}
        attempt.spans = [TimeSpan("start", attempt.began, attempt.ended, attempt.number)]
        return
    steps, times, kept = rows["step"][own_rows], rows["time"][own_rows], metrics.kept[own_rows]
    took = rows["step_time_s"][own_rows]
    stalls = (
        _without_nan(rows["time_split_s.checkpoint"][own_rows]) if "time_split_s.checkpoint" in rows else 0 * took
    )
    begins = times - took
    first, last = max(float(begins[0]), attempt.began), float(times[-1])
    attempt.ended = max(attempt.ended, last)
    attempt.first_step, attempt.last_step = int(steps.min()), int(steps.max())
    attempt.kept, attempt.lost = int(kept.sum()), int((~kept).sum())
    useful = float((took - stalls)[kept].sum())
    stalled, lost = float(stalls[kept].sum()), float(took[~kept].sum())
    remaining_s = max(0.0, last - first - float(took.sum()))
    recovery = min(recovery_s, remaining_s)
    attempt.seconds = {
        "start": first - attempt.began,
        "steps": useful,
        "checkpoint": stalled,
        "lost": lost,
        "recovery": recovery,
        "between": remaining_s - recovery,
        "end": attempt.ended - last,
    }
    attempt.spans = [
        TimeSpan("start", attempt.began, first, attempt.number),
        *_stretches(begins, times, kept, attempt.number),
        TimeSpan("end", last, attempt.ended, attempt.number),
    ]


def _stretches(
    begins: NDArray[np.float64], ends: NDArray[np.float64], kept: NDArray[np.bool_], attempt: int
) -> list[TimeSpan]:
    """Return spans of steps that were kept, or lost, in a row."""
    import numpy as np

    changes = [0, *(np.flatnonzero(np.diff(kept.astype(int))) + 1).tolist(), len(kept)]
    return [
        TimeSpan("steps" if kept[low] else "lost", float(begins[low]), float(ends[high - 1]), attempt)
        for low, high in pairwise(changes)
    ]


def _waits(marks: Sequence[Event], attempts: Sequence[Attempt], now: float | None) -> list[TimeSpan]:
    """Return the time that belongs to no attempt: in the queue, between attempts, after the last one."""
    ended = {attempt.number: attempt.ended for attempt in attempts}
    spans: list[TimeSpan] = []
    since: float | None = None  # from when on the run was active and no attempt's
    kind = "queue"
    last_end: RunEnded | None = None  # the end of a run that Slurm may requeue by itself, without an event
    runs = False  # an attempt whose end was not recorded yet
    for event in marks:
        runs = isinstance(event, AttemptStarted) or (runs and not isinstance(event, AttemptEnded))
        if isinstance(event, Submitted):  # the job before is gone: `submit` refuses while there is one
            since, kind, last_end = event.time, "queue", None
        elif isinstance(event, Requeued | RequeuedByUser):
            if since is None:
                since = event.time
            elif kind == "down" and event.time > since:  # the job held its nodes until then
                spans.append(TimeSpan("down", since, event.time))
                since = event.time
            kind = "queue"
        elif isinstance(event, DeputyActed) and runs and since is not None and kind == "down":
            if event.time > since:
                spans.append(TimeSpan("down", since, event.time))
                since = event.time
            kind = "queue"
        elif isinstance(event, SupervisorStarted) and runs and event.adopted is None and kind == "down":
            kind = "queue"  # Slurm requeued a job whose supervisor was gone: another one would have adopted
        elif isinstance(event, AttemptStarted):
            if since is None and last_end is not None and last_end.job_id == event.job_id:
                since, kind = last_end.time, "queue"
            if since is not None and event.time > since:
                spans.append(TimeSpan(kind, since, event.time))
            since, kind, last_end = ended[event.attempt], "down", None
        elif isinstance(event, Cancelled):
            if since is not None and event.time > since:
                spans.append(TimeSpan(kind, since, event.time))
                since = None
            last_end = None
        elif isinstance(event, RunEnded):
            if since is not None and event.time > since and kind == "down":
                spans.append(TimeSpan("end", since, event.time))
            if kind == "down":
                since, last_end = None, event if event.outcome == "interrupted" else None
    if now is not None and since is not None and not any(attempt.outcome == "running" for attempt in attempts):
        spans.append(TimeSpan(kind, since, max(now, since)))
    return spans


def _is_nan(values: NDArray[np.float64]) -> NDArray[np.bool_]:
    import numpy as np

    return np.isnan(values)


def _without_nan(values: NDArray[np.float64]) -> NDArray[np.float64]:
    import numpy as np

    return np.nan_to_num(values)
