"""`zslurm logs --events`: what happened to runs, the supervisor's events and what people did in order of time."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from functools import lru_cache
from itertools import islice
from json import dumps
from typing import Any

from zslurm.cli.logs.rank_log import looks
from zslurm.cli.options import parse_since
from zslurm.cli.terminal.screen import columns_of_terminal, print_styled
from zslurm.cli.terminal.table import HEAD, QUIET, Column, print_table
from zslurm.core.console import harmless, say
from zslurm.core.errors import ConfigError
from zslurm.core.units import show_time
from zslurm.run.events import describe
from zslurm.run.events.event import from_row
from zslurm.run.events.event_log import EventLog
from zslurm.run.find import find_all
from zslurm.run.index import known_runs
from zslurm.run.run_dir import RunDir

COLUMNS = (Column("time", drop=1), Column("run"), Column("event", drop=2), Column("what", "text"))
MOST = 1000
"""Events that are shown if nothing else is asked for."""
_OF_ONE_RUN = (Column("time"), Column("run", drop=2), Column("event", drop=1), Column("what", "text"))


def print_events(
    runs: list[str], *, follow: bool, tail: int | None, every: bool, since: str | None, json: bool
) -> None:
    """Print what happened to runs, all of them without names: starts, failures, decisions, requeues.

    With `json` a line of JSON for each event, all of them.

    Raises:
        ConfigError: `tail` and `every` are given both, or `since` is no time.
        NotFound: there is no such run.
    """
    if every and tail is not None:
        raise ConfigError("--all and -n: give one of them")
    chosen = find_all(runs) if runs else known_runs()
    earliest = None if since is None else parse_since(since)
    limited = tail is None and since is None and not every and not json
    recorded = recorded_events(chosen, MOST + 1 if limited else tail, follow=follow, since=earliest)
    several = len(chosen) > 1
    if json:
        for run, event in recorded:
            print(dumps(as_json(run, event)), flush=follow)
        return
    rows = (as_row(*pair) for pair in recorded)
    if follow:
        for row in rows:
            _print_events([row], several=several)
        return
    table = list(islice(rows, MOST + 1))
    if limited and len(table) > MOST:
        say(f"these are the last {MOST:,} events; --all shows every one")
        del table[0]
    if len(table) <= MOST:
        print_table(COLUMNS if several else _OF_ONE_RUN, table)
        return
    while table:  # too many to lay out together
        _print_events(table, several=several)
        table = list(islice(rows, MOST))


def _print_events(rows: Sequence[Sequence[str]], *, several: bool) -> None:
    """Print events as soon as they are known: on a terminal without aligning them with later ones."""
    if columns_of_terminal() is None:
        print("\n".join(map(_line, rows)), flush=True)
        return
    for when, run, _, what in rows:
        print_styled([[(f"{when}  ", QUIET), *([(f"{run}  ", HEAD)] if several else []), (what, "")]])
    sys.stdout.flush()


def _line(row: Sequence[str]) -> str:
    return "\t".join(row if "".join(row).isprintable() else map(harmless, row))


def as_row(run: RunDir, event: dict[str, Any]) -> list[str]:
    """Return one line of the table."""
    typed = from_row(event)
    return [_second(typed.time // 1), run.name, typed.NAME or typed.tag, typed.describe()]


@lru_cache(maxsize=16)
def _second(when: float) -> str:
    """Return a second as text: events of single ranks come by the hundred."""
    return show_time(when)


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
    if last is None:
        yield from log.news(since=since)
        _say_damaged(log)
    else:
        newest = log.newest(last, since=since)
        _say_damaged(log)
        yield from newest
    states = looks(runs, follow=follow)
    next(states)
    for active in states:
        added = list(log.news())
        yield from added
        if not active and not added:
            return


def _say_damaged(log: EventLog) -> None:
    """Name what was read and cannot be shown."""
    for path, count in log.damaged():
        lines = "1 damaged line is" if count == 1 else f"{count:,} damaged lines are"
        say(f"{path}: {lines} left out")
