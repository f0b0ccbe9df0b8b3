"""`zslurm events`: what happened to runs, the supervisor's events and what people did in order of time."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from json import dumps
from typing import Annotated, Any

import typer

from zslurm.cli.options import TIMES, Follow, Json, SomeRuns, parse_since
from zslurm.cli.run.polling import looks
from zslurm.cli.terminal.screen import columns_of_terminal, print_styled
from zslurm.cli.terminal.table import HEAD, QUIET, Column, print_table
from zslurm.core.units import show_time
from zslurm.run.events import describe
from zslurm.run.events.event import from_row
from zslurm.run.events.event_log import EventLog, time_of
from zslurm.run.find import find_all
from zslurm.run.index import known_runs
from zslurm.run.run_dir import RunDir

COLUMNS = (Column("time", drop=1), Column("run"), Column("event", drop=2), Column("what", "text"))
_OF_ONE_RUN = (Column("time"), Column("run", drop=2), Column("event", drop=1), Column("what", "text"))


def events(
    runs: SomeRuns = None,
    follow: Follow = False,
    tail: Annotated[
        int | None, typer.Option("-n", "--tail", metavar="N", min=0, help="Only the last N events.")
    ] = None,
    since: Annotated[str | None, typer.Option(metavar="TIME", help=f"Only events since: {TIMES}.")] = None,
    json: Json = False,
) -> None:
    """Show what happened to runs, and who did what. Starts, failures, decisions, requeues.

    With --json a line of JSON for each event.

    Example: zslurm events my-run -f
    """
    chosen = find_all(runs) if runs else known_runs()
    earliest = None if since is None else parse_since(since)
    found = recorded_events(chosen, tail, follow=follow, since=earliest)
    if not follow and not json:
        print_table(COLUMNS if len(chosen) > 1 else _OF_ONE_RUN, [as_row(*pair) for pair in found])
        return
    for run, event in found:
        if json:
            print(dumps(as_json(run, event)), flush=True)
        else:
            _print_event(as_row(run, event), several=len(chosen) > 1)


def _print_event(row: Sequence[str], *, several: bool) -> None:
    """Print an event while following: on a terminal as in the table, without columns that it cannot know yet."""
    if columns_of_terminal() is None:
        print("\t".join(row), flush=True)
        return
    when, run, _, what = row
    print_styled([[(f"{when}  ", QUIET), *([(f"{run}  ", HEAD)] if several else []), (what, "")]])
    sys.stdout.flush()


def as_row(run: RunDir, event: dict[str, Any]) -> list[str]:
    """Return one line of the table."""
    typed = from_row(event)
    return [show_time(time_of(event)), run.name, typed.tag, typed.describe()]


def as_json(run: RunDir, event: dict[str, Any]) -> dict[str, Any]:
    """Return the event as it was recorded, with its run and a sentence that describes it."""
    return {"run": run.name, "run_dir": str(run.path), **event, "words": describe(event)}


def recorded_events(
    runs: Sequence[RunDir], last: int | None = None, *, follow: bool = False, since: float | None = None
) -> Iterator[tuple[RunDir, dict[str, Any]]]:
    """Yield the events of several runs in order of time, and what people did: the `last` of those that are there.

    When following, those that are added, too, until none of the runs is active any more.
    """
    log = EventLog(runs)
    there = log.news(since=since)
    yield from there if last is None else there[len(there) - min(last, len(there)) :]
    states = looks(runs, follow=follow)
    next(states)
    for active in states:
        found = log.news()
        yield from found
        if not active and not found:
            return
