"""Where the time goes between a fault and the first new step, read from events and from the marks of the ranks."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

from tests.faults.harness import FaultRun

PARTS = ("detect", "tear down", "queue", "decide", "srun", "import", "load", "first step")
"""
detect      from the fault until it, or its consequence, is in the events
tear down   until the attempt's processes are gone and its outcome is recorded (attempt_ended)
queue       until the supervisor of the requeued job runs
decide      until the next attempt is asked for (attempt_started): a spare's examination, or that of the nodes
srun        until the last rank's Python runs
import      until the last rank has imported the trainer
load        until the last rank has loaded its checkpoint
first step  until the first new step is taken
"""


@dataclass(frozen=True)
class Recovery:
    """The way from one fault to the first new step.

    Attributes:
        detected_as: kind of the fault as it was named.
        detect_s: seconds until it was noticed; None if it was not.
        parts: seconds by part, without parts that there were not; empty if no new attempt was needed or made.
    """

    detected_as: str | None
    detect_s: float | None
    parts: dict[str, float]


def recovery(run: FaultRun, happened: float, kinds: Collection[str]) -> Recovery:
    """Measure the first recovery after a fault.

    Args:
        happened: when it was injected.
        kinds: faults or events by which it is noticed, if no decision names its root.
    """
    root = (_first(run, "decision", happened) or {}).get("root") or {}
    wanted = {root["kind"]} if root else set(kinds)
    seen: dict[str, Any] = next(
        (event for event in run.events() if event["time"] >= happened and name(event) in wanted), {}
    )
    kind = name(seen) if seen else None
    detect_s = seen["time"] - happened if seen else None
    stepped = {mark["attempt"] for mark in run.marks("stepped")}
    starts = [event for event in run.events("attempt_started") if event["time"] >= happened]
    if not starts:
        return Recovery(kind, detect_s, {})
    # Slurm may refuse the first: the one that took a step is what was waited for.
    started = next((event for event in starts if event["attempt"] in stepped), starts[0])
    number = started["attempt"]
    marks = {
        what: [mark["time"] for mark in run.marks(what) if mark["attempt"] == number]
        for what in ("python", "imported", "loaded", "stepped")
    }
    again = _first(run, "supervisor_started", happened) or {}
    ended = _first(run, "attempt_ended", happened) or {}
    moments: dict[str, float | None] = {
        "detect": seen.get("time"),
        "tear down": ended.get("time") if ended.get("outcome") != "lost" else None,
        "queue": again.get("time") if "adopted" not in again and again.get("time", 0) < started["time"] else None,
        "decide": started["time"],
        "srun": max(marks["python"], default=None),
        "import": max(marks["imported"], default=None),
        "load": max(marks["loaded"], default=None),
        "first step": min(marks["stepped"], default=None),
    }
    parts, before = {}, happened
    for part, moment in moments.items():
        if moment is not None:
            parts[part] = max(0.0, moment - before)
            before = max(before, moment)
    return Recovery(kind, detect_s, parts)


def name(event: dict[str, Any]) -> str:
    """What an event says: the kind of a fault, else of the event."""
    return str(event["kind"] if event["event"] == "fault_detected" else event["event"])


def _first(run: FaultRun, kind: str, after: float) -> dict[str, Any] | None:
    """The first event of a kind since a time."""
    return next((event for event in run.events(kind) if event["time"] >= after), None)


@dataclass(frozen=True)
class InMemory:
    """The recovery in memory from one fault.

    Attributes:
        regroup_s: from the notice that ranks are lost until all ranks train again, as the supervisor measured it.
        first_step_s: from the fault to the first new step.
        rolled_back: steps that had been taken, and had to be taken again, of each recovery.
    """

    regroup_s: float
    first_step_s: float | None
    rolled_back: tuple[int, ...]


def in_memory(run: FaultRun, happened: float) -> InMemory | None:
    """Measure the recoveries in memory after a fault; None if there was none."""
    recoveries = [event for event in run.recoveries() if event["time"] >= happened]
    if not recoveries:
        return None
    first = recoveries[0]
    again = next(
        (row["time"] for row in run.metrics("step") if row["time"] > happened and row["step"] > first["step"]),
        None,
    )
    return InMemory(
        first["seconds"],
        None if again is None else again - happened,
        tuple(event["rolled_back"] for event in recoveries),
    )
