"""`zslurm events`: what happened to runs, the supervisor's events and what people did in order of time."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from json import dumps
from typing import Annotated, Any

import typer

from zslurm.cli.options import Follow, Json, SomeRuns
from zslurm.cli.run.polling import looks
from zslurm.core.console import print_table
from zslurm.core.units import show_time
from zslurm.run.event import from_row
from zslurm.run.events import describe
from zslurm.run.find import find_all
from zslurm.run.index import known_runs
from zslurm.run.run_dir import RunDir
from zslurm.train.jsonl import JsonLinesTail

COLUMNS = ("time", "run", "event", "what")


def events(
    runs: SomeRuns = None,
    follow: Follow = False,
    lines: Annotated[int | None, typer.Option("-n", "--lines", min=0, help="Only the last N events.")] = None,
    json: Json = False,
) -> None:
    """Show what happened to runs, and who did what: starts, failures, requeues.

    With --json a line of JSON for each event.

    Example: zslurm events my-run -f
    """
    chosen = find_all(runs) if runs else known_runs()
    found = recorded_events(chosen, lines, follow=follow)
    if not follow and not json:
        print_table(COLUMNS, [as_row(*pair) for pair in found])
        return
    for run, event in found:
        print(dumps(as_json(run, event)) if json else "\t".join(as_row(run, event)), flush=True)


def as_row(run: RunDir, event: dict[str, Any]) -> list[str]:
    """Return one line of the table."""
    typed = from_row(event)
    return [show_time(_time(event)), run.name, typed.tag, typed.describe()]


def as_json(run: RunDir, event: dict[str, Any]) -> dict[str, Any]:
    """Return the event as it was recorded, with its run and a sentence that describes it."""
    return {"run": run.name, "run_dir": str(run.path), **event, "words": describe(event)}


def recorded_events(
    runs: Sequence[RunDir], last: int | None = None, *, follow: bool = False
) -> Iterator[tuple[RunDir, dict[str, Any]]]:
    """Yield the events of several runs in order of time, and what people did: the `last` of those that are there.

    When following, those that are added, too, until none of the runs is active any more.
    """
    tails = [(run, JsonLinesTail(path)) for run in runs for path in (run.submissions, run.events)]
    there = _news(tails)
    yield from there if last is None else there[len(there) - min(last, len(there)) :]
    states = looks(runs, follow=follow)
    next(states)
    for active in states:
        found = _news(tails)
        yield from found
        if not active and not found:
            return


def _news(tails: Sequence[tuple[RunDir, JsonLinesTail]]) -> list[tuple[RunDir, dict[str, Any]]]:
    found = [(run, event) for run, tail in tails for event in tail.new_records()]
    return sorted(found, key=lambda pair: _time(pair[1]))


def _time(event: dict[str, Any]) -> float:
    return float(event.get("time") or 0.0)
