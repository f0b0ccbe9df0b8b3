"""What happened to runs, in words: the supervisor's events together with what people did, in order of time."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

from train.jsonl import JsonLinesTail, read_jsonl
from zslurm.launch.run_dir import RunDir
from zslurm.launch.run_state import look_all
from zslurm.report.values import show_time

COLUMNS = ("time", "run", "event", "what")
_POLL_S = 1.0
_STATE_EVERY_S = 5.0
_HEADER = ("time", "event", "job_id", "attempt", "action")


def describe_cause(cause: dict[str, Any]) -> str:
    """The root of a failure in one line: who, when, what."""
    where = [f"rank {cause['rank']}" if cause.get("rank") is not None else ""]
    where.append(f"on {cause['node']}" if cause.get("node") else "")
    where.append(f"after step {cause['step']}" if cause.get("step", -1) > 0 else "")
    place = " ".join(word for word in where if word)
    return f"{place}: {cause['message']}" if place else str(cause["message"])


def describe(event: dict[str, Any]) -> str:
    """An event in words; one of a kind that is not known here as its fields."""
    words = _WORDS.get(event.get("event") or event.get("action") or "")
    try:
        return words(event) if words is not None else _fields(event)
    except (KeyError, TypeError):
        return _fields(event)


def _fields(event: dict[str, Any]) -> str:
    shown = {name: value for name, value in event.items() if name not in _HEADER and value is not None}
    return " ".join(
        f"{name}={value if isinstance(value, str) else json.dumps(value)}" for name, value in shown.items()
    )


def _ended(event: dict[str, Any]) -> str:
    cause = f": {describe_cause(event['cause'])}" if event.get("cause") else ""
    which = f"attempt {event['attempt']}" if "attempt" in event else "the run"
    return f"{which} {event['outcome']} (exit code {event['exit_code']}){cause}"


def _by(verb: str) -> Callable[[dict[str, Any]], str]:
    def words(row: dict[str, Any]) -> str:
        without = f", without {row['excluded']} from now on" if row.get("excluded") else ""
        return f"{verb} by {row['user']} as job {row['job_id']}{without}"

    return words


def _ranks(event: dict[str, Any]) -> str:
    ranks = event["ranks"]
    which = f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {', '.join(map(str, ranks))}"
    return f"{which} on {event['node']}: {event['what']}"


_WORDS: dict[str, Callable[[dict[str, Any]], str]] = {
    "supervisor_started": lambda e: (
        f"the supervisor started on {e['host']}"
        + (f" and took attempt {e['adopted']} up" if "adopted" in e else "")
    ),
    "attempt_started": lambda e: f"attempt {e['attempt']} started on {e['nodes']}, {e['world_size']} ranks",
    "signal": lambda e: f"asked to save and stop ({e['signal']})",
    "ranks_ended": _ranks,
    "step_killed": lambda e: f"attempt {e['attempt']} was torn down: {e['reason']}",
    "attempt_ended": _ended,
    "run_ended": _ended,
    "lock_taken_over": lambda e: f"took the checkpoints' lock over from {e['holder']}, which is gone",
    "submit": _by("submitted"),
    "requeue": _by("requeued"),
    "exclude": _by("changed"),
    "cancel": _by("cancelled"),
    "successor": lambda e: f"job {e['successor']} waits to continue the run if job {e['job_id']} ends early",
    "successor_ended": lambda e: f"job {e['job_id']} had nothing to continue: {e['reason']}",
    "hold": _by("held"),
    "release": _by("released"),
}


def events_of(run: RunDir) -> list[dict[str, Any]]:
    """Everything that happened to a run, oldest first; what people did has `action` where others have `event`."""
    return sorted([*read_jsonl(run.submissions), *read_jsonl(run.events)], key=_time)


def as_row(run: RunDir, event: dict[str, Any]) -> list[str]:
    """One line of the table."""
    kind = event.get("event") or event.get("action") or "?"
    return [show_time(_time(event)), run.name, str(kind), describe(event)]


def as_json(run: RunDir, event: dict[str, Any]) -> dict[str, Any]:
    """The event as it was recorded, with its run and with its words."""
    return {"run": run.name, "run_dir": str(run.path), **event, "words": describe(event)}


def all_events(runs: Sequence[RunDir]) -> list[tuple[RunDir, dict[str, Any]]]:
    """The events of several runs in order of time."""
    return sorted(((run, event) for run in runs for event in events_of(run)), key=lambda pair: _time(pair[1]))


def follow_events(runs: Sequence[RunDir], last: int | None = None) -> Iterator[tuple[RunDir, dict[str, Any]]]:
    """The events of several runs, and those that are added, until none of the runs is active any more.

    Args:
        runs: the runs.
        last: of the events that are there already, only so many.
    """
    tails = [(run, JsonLinesTail(path)) for run in runs for path in (run.submissions, run.events)]
    there = _news(tails)
    yield from there if last is None else there[len(there) - min(last, len(there)) :]
    active, asked = _any_active(runs), time.monotonic()
    while True:
        found = _news(tails)
        yield from found
        if not active and not found:
            return
        if time.monotonic() - asked > _STATE_EVERY_S:
            active, asked = _any_active(runs), time.monotonic()
        time.sleep(_POLL_S if active else 0)


def _news(tails: Sequence[tuple[RunDir, JsonLinesTail]]) -> list[tuple[RunDir, dict[str, Any]]]:
    found = [(run, event) for run, tail in tails for event in tail.new_records()]
    return sorted(found, key=lambda pair: _time(pair[1]))


def _any_active(runs: Iterable[RunDir]) -> bool:
    return any(state.active for state in look_all(list(runs), cached=True))


def _time(event: dict[str, Any]) -> float:
    return float(event.get("time") or 0.0)
