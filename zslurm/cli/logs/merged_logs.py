"""The logs of several ranks as one, in the order in which their lines were written.

Each line comes with its time and its rank. Times are those of run/log_times.py, good to a second; within one,
lines are in the order of their ranks, and each rank's own lines always in their own order.
"""

from __future__ import annotations

import heapq
import json
import sys
import time
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from zslurm.cli.logs.rank_log import chosen_attempt, no_log, ranks_with_logs, shown_on
from zslurm.cli.run import polling
from zslurm.core.units import show_time
from zslurm.run.log_times import LogTimes
from zslurm.run.run_dir import AttemptDir, RunDir

_RANKS_PER_POLL = 64
"""For every so many ranks one more pause between two looks: each look asks the shared file system about each."""
BLOCK = 1 << 16
"""Bytes of a log that are read at once."""


class LogLine(NamedTuple):
    """One line of one rank; sorts by time, then by rank."""

    when: float
    rank: int
    offset: int
    text: bytes
    """Without its line break."""


@dataclass
class _RankLog:
    """How far one rank's log was read."""

    attempt: AttemptDir
    rank: int
    offset: int = 0
    begun: bytes = field(default=b"", repr=False)
    """The start of a line whose end is not there yet."""

    def lines(self, *, whole: bool) -> Iterator[LogLine]:
        """Yield the lines that were not read yet, a block at a time: a thousand open files would be too many.

        With `whole` nothing more will come: an unfinished last line counts too.
        """
        path = self.attempt.rank_log(self.rank)
        times: LogTimes | None = None
        while True:
            try:
                with path.open("rb") as file:
                    file.seek(self.offset)
                    block = file.read(BLOCK)
            except FileNotFoundError:
                return
            if not block:
                break
            times = times or LogTimes(path, self.attempt.rank_log_times(self.rank))
            start = self.offset - len(self.begun)
            self.offset += len(block)
            *lines, self.begun = (self.begun + block).split(b"\n")
            for line in lines:
                start += len(line) + 1
                yield LogLine(times.of(start), self.rank, start, line)
        if whole and self.begun:
            times = times or LogTimes(path, self.attempt.rank_log_times(self.rank))
            line, self.begun = self.begun, b""
            yield LogLine(times.of(self.offset), self.rank, self.offset, line)


def print_merged(
    run: RunDir,
    *,
    ranks: Sequence[int] | None,
    attempt: int | None,
    last_lines: int | None,
    since: float | None = None,
    follow: bool,
    as_json: bool,
) -> None:
    """Print the logs of several ranks, merged, to standard output.

    Without `ranks` all; `attempt`, `last_lines`, `since`, `follow` as in `print_logs`; with `as_json` each line is
    one of JSON.

    Raises:
        NotFound: there is no such attempt or rank, or no log and none to be expected.
    """
    chosen = chosen_attempt(run, attempt)
    states = polling.looks([run], follow=follow)
    active = next(states)
    logs = _open_logs(run, chosen, ranks, {})
    if not logs and not active:
        raise no_log(run)
    merged: Iterable[LogLine] = heapq.merge(*(log.lines(whole=not active) for log in logs.values()))
    if since is not None:
        merged = (line for line in merged if line.when >= since)
    _print(merged if last_lines is None else deque(merged, maxlen=last_lines), chosen, as_json)
    for active in states:
        newest = chosen_attempt(run, attempt)
        if newest != chosen:
            _print(_news(logs, whole=True), chosen, as_json)
            chosen, logs = newest, {}
        logs = _open_logs(run, chosen, ranks, logs)
        if not _print(_news(logs, whole=not active), chosen, as_json) and not active:
            return
        time.sleep(polling.POLL_S * (len(logs) // _RANKS_PER_POLL))


def _open_logs(
    run: RunDir, attempt: AttemptDir | None, ranks: Sequence[int] | None, known: dict[int, _RankLog]
) -> dict[int, _RankLog]:
    """Return the logs that are there by now; those that were known continue after the lines shown."""
    if attempt is None:
        return known
    return {rank: known.get(rank) or _RankLog(attempt, rank) for rank in ranks_with_logs(run, attempt, ranks)}


def _news(logs: dict[int, _RankLog], *, whole: bool) -> list[LogLine]:
    return sorted(line for log in logs.values() for line in log.lines(whole=whole))


def _print(lines: Iterable[LogLine], attempt: AttemptDir | None, as_json: bool) -> bool:
    """Print lines; returns whether there were any."""
    out, any_line = sys.stdout.buffer, False
    number = attempt.number if attempt is not None else 0
    for line in lines:
        any_line = True
        if as_json:
            text = line.text.decode("utf-8", "replace")
            body = {"time": line.when, "attempt": number, "rank": line.rank, "line": text}
            out.write(json.dumps(body).encode() + b"\n")
        else:
            shown = show_time(line.when, "%m-%d %H:%M:%S")
            out.write(f"{shown} rank {line.rank}: ".encode() + shown_on(sys.stdout, line.text) + b"\n")
    out.flush()
    return any_line
