"""What happened to runs, in words: the supervisor's events together with what people did, in order of time."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Sequence
from json import dumps
from typing import Annotated, Any

import typer

from zslurm.cli.options import Json, SomeRuns
from zslurm.core.console import print_table
from zslurm.core.units import show_time
from zslurm.run.event import from_row
from zslurm.run.events import describe
from zslurm.run.find import find_all
from zslurm.run.index import known_runs
from zslurm.run.run_dir import RunDir
from zslurm.run.state import look_all
from zslurm.train.jsonl import JsonLinesTail, read_jsonl


def events(
    runs: SomeRuns = None,
    follow: Annotated[
        bool, typer.Option("-f", "--follow", help="Go on printing until the runs have ended.")
    ] = False,
    lines: Annotated[int | None, typer.Option("-n", "--lines", min=0, help="Only the last N events.")] = None,
    json: Json = False,
) -> None:
    """Show what happened to runs, and who did what: starts, failures, requeues.

    With --json a line of JSON for each event.

    Example: zslurm events my-run -f
    """
    chosen = find_all(runs) if runs else known_runs()
    if not follow:
        found = all_events(chosen)
        found = found if lines is None else found[len(found) - min(lines, len(found)) :]
        if not json:
            print_table(COLUMNS, [as_row(*pair) for pair in found])
            return
    for run, event in follow_events(chosen, lines) if follow else found:
        print(dumps(as_json(run, event)) if json else "\t".join(as_row(run, event)), flush=True)


COLUMNS = ("time", "run", "event", "what")
_POLL_S = 1.0
_STATE_EVERY_S = 5.0


def events_of(run: RunDir) -> list[dict[str, Any]]:
    """Everything that happened to a run, oldest first; what people did has `action` where others have `event`."""
    return sorted([*read_jsonl(run.submissions), *read_jsonl(run.events)], key=_time)


def as_row(run: RunDir, event: dict[str, Any]) -> list[str]:
    """One line of the table."""
    typed = from_row(event)
    return [show_time(_time(event)), run.name, typed.tag, typed.describe()]


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
