"""What happened to runs, and what people did to them, in order of time: as it was recorded, and as it is added."""

from __future__ import annotations

import heapq
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

from zslurm.run.events.event import Event, select
from zslurm.run.run_dir import RunDir
from zslurm.train.jsonl import JsonLinesTail, parse_line

E = TypeVar("E", bound=Event)
_KIND = re.compile(rb'"event":\s?"(\w+)"')
_HEAD = 200
"""Bytes of a line that hold the kind, which is one of the first fields."""


class EventLog:
    """The events and submissions of some runs."""

    def __init__(self, runs: Sequence[RunDir]) -> None:
        """Begin before the first event."""
        self._tails = [(run, JsonLinesTail(path)) for run in runs for path in (run.submissions, run.events)]

    def news(self, *, since: float | None = None) -> Iterator[tuple[RunDir, dict[str, Any]]]:
        """Yield the rows that no call returned before, oldest first; with `since` those from that time on.

        The rows of one file stay in their order. They are read while they are taken, so a file of any length
        needs no memory.
        """
        return self._merged(JsonLinesTail.iter_records, since)

    def newest(self, count: int, *, since: float | None = None) -> list[tuple[RunDir, dict[str, Any]]]:
        """Return the last rows that are there, oldest first, at most `count`; `news` continues after them."""
        merged = list(self._merged(lambda tail: tail.newest_records(count), since))
        return merged[len(merged) - min(count, len(merged)) :]

    def _merged(
        self, read: Callable[[JsonLinesTail], Iterable[dict[str, Any]]], since: float | None
    ) -> Iterator[tuple[RunDir, dict[str, Any]]]:
        earliest = float("-inf") if since is None else since

        def rows_of(run: RunDir, tail: JsonLinesTail) -> Iterator[tuple[RunDir, dict[str, Any]]]:
            return ((run, row) for row in read(tail) if time_of(row) >= earliest)

        return heapq.merge(*(rows_of(*each) for each in self._tails), key=lambda pair: time_of(pair[1]))


def time_of(event: Mapping[str, Any]) -> float:
    """Return when something happened (UNIX seconds); 0 where a damaged row does not have it."""
    return float(event.get("time") or 0.0)


def kind_of(line: bytes) -> bytes | None:
    """Return the kind of an event by the beginning of its line, without parsing it; None if it is not there."""
    match = _KIND.search(line, 0, _HEAD)
    return match[1] if match else None


def read_events(path: Path, *kinds: type[E]) -> Iterator[E]:
    """Yield the events of some kinds in a run's events.jsonl, oldest first; none if there is no such file.

    Lines of other kinds are not parsed: a run of some weeks writes a million, most of them about single ranks.
    """
    names = {kind.NAME.encode() for kind in kinds}
    try:
        with path.open("rb") as file:
            rows = (parse_line(line) for line in file if kind_of(line) in names)
            yield from select((row for row in rows if row is not None), *kinds)
    except FileNotFoundError:
        return
