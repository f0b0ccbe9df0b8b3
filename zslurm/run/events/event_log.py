"""What happened to runs, and what people did to them, in order of time: as it was recorded, and as it is added."""

from __future__ import annotations

import heapq
import json
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, BinaryIO

import msgspec

from zslurm.run.run_dir import RunDir
from zslurm.train.jsonl import JsonLinesTail, parse_line

_KIND = re.compile(rb'"event":\s?"(\w+)"')
_BLOCK = 1 << 18
"""Bytes that are read at once."""
_HEAD = 200
"""Bytes of a line that hold the kind, which is one of the first fields."""


_DECODER = msgspec.json.Decoder()
"""Takes a third of the time of Python's; it refuses NaN and lone surrogates, which Python writes."""

_Timed = tuple[float, int, RunDir, dict[str, Any]]
"""A row with its time and the number of its file, which put it in order before anything else is compared."""


class EventLog:
    """The events and submissions of some runs."""

    def __init__(self, runs: Sequence[RunDir]) -> None:
        """Begin before the first event."""
        self._tails = [
            (run, JsonLinesTail(path, _decode)) for run in runs for path in (run.submissions, run.events)
        ]

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

    def damaged(self) -> Iterator[tuple[Path, int]]:
        """Yield each file with lines that were read and cannot be understood, and how many they are."""
        for _, tail in self._tails:
            if tail.damaged:
                yield tail.path, tail.damaged

    def _merged(
        self, read: Callable[[JsonLinesTail], Iterable[dict[str, Any]]], since: float | None
    ) -> Iterator[tuple[RunDir, dict[str, Any]]]:
        earliest = float("-inf") if since is None else since

        def rows_of(number: int, run: RunDir, tail: JsonLinesTail) -> Iterator[_Timed]:
            for row in read(tail):
                when = time_of(row)
                if when >= earliest:
                    yield when, number, run, row

        tails = (rows_of(number, *tail_rows) for number, tail_rows in enumerate(self._tails))
        return ((run, row) for _, _, run, row in heapq.merge(*tails))


def _decode(line: bytes) -> Any:
    try:
        return _DECODER.decode(line)
    except msgspec.DecodeError:
        return json.loads(line)


def time_of(event: Mapping[str, Any]) -> float:
    """Return when something happened (UNIX seconds); 0 if a damaged row does not have it."""
    return float(event.get("time") or 0.0)


def kind_of(line: bytes) -> bytes | None:
    """Return the kind of an event by the beginning of its line, without parsing it; None if it is not there."""
    match = _KIND.search(line, 0, _HEAD)
    return match[1] if match else None


def blocks_of_lines(file: BinaryIO) -> Iterator[bytes]:
    """Yield the rest of a file in blocks of whole lines, without an unfinished last line."""
    while block := file.read(_BLOCK):
        block += file.readline()
        if not block.endswith(b"\n"):
            block = block[: block.rfind(b"\n") + 1]
        yield block


def pattern_of_kinds(kinds: Collection[str]) -> re.Pattern[bytes]:
    """Return what `rows_of_kinds` looks for."""
    return re.compile(rb'"event": ?"(?:%b)"' % "|".join(sorted(kinds)).encode())


def rows_of_kinds(block: bytes, pattern: re.Pattern[bytes]) -> Iterator[dict[str, Any] | None]:
    """Yield the rows of some kinds in a block of lines; other lines are not parsed.

    A row that is damaged in its middle is None; `damaged_lines` counts the others.

    A run of some weeks writes a million lines, most of them about single ranks.
    """
    end = 0
    for match in pattern.finditer(block):
        if match.start() < end:  # the same line names a kind twice
            continue
        begin, end = block.rfind(b"\n", 0, match.start()) + 1, block.find(b"\n", match.end()) + 1
        row = parse_line(block[begin:end])
        if row is None and block[begin:end].endswith(b"}\n"):
            yield None
        elif row is not None and "event" in row:
            yield row


def damaged_lines(block: bytes) -> int:
    """Return how many lines of a block do not begin and end as an object does; they are not parsed."""
    if block.startswith(b"{") and block.endswith(b"}\n") and block.count(b"}\n{") == block.count(b"\n") - 1:
        return 0
    lines = (line.strip() for line in block.split(b"\n"))
    return sum(bool(line) and not (line.startswith(b"{") and line.endswith(b"}")) for line in lines)
