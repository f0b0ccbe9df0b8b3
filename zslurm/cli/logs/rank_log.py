"""Print and follow logs of a run: one as it is, a rank's or the job's own, or those of several ranks as one.

Merged lines come in the order in which they were written, each with its time and its rank. Times are those of
run/log_times.py, good to a second; within one, lines are in the order of their ranks, and each rank's own lines
always in their own order.
"""

from __future__ import annotations

import heapq
import json
import re
import sys
import time
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple, TextIO

from zslurm.core.console import harmless, say
from zslurm.core.errors import NotFound
from zslurm.core.files import read_json
from zslurm.core.units import show_time
from zslurm.run.log_times import LogTimes
from zslurm.run.run_dir import AttemptDir, RunDir
from zslurm.run.state.run_state import look_all, recorded_job


def chosen_attempt(run: RunDir, number: int | None) -> AttemptDir | None:
    """Return the attempt of a number, or the newest; None if there is none yet.

    Raises:
        NotFound: there is no attempt of this number.
    """
    attempts = run.attempt_dirs()
    if number is None:
        return attempts[-1] if attempts else None
    for attempt in attempts:
        if attempt.number == number:
            return attempt
    raise NotFound(f"{run.name}: there is no attempt {number}")


def previous_attempt(run: RunDir) -> AttemptDir:
    """Return the attempt before the newest.

    Raises:
        NotFound: there is none.
    """
    attempts = run.attempt_dirs()
    if len(attempts) < 2:
        raise NotFound(f"{run.name}: there is no attempt before the {'newest' if attempts else 'first'}")
    return attempts[-2]


def ranks_with_logs(run: RunDir, attempt: AttemptDir, ranks: Sequence[int] | None) -> list[int]:
    """Return the ranks that have a log, of those asked for.

    Raises:
        NotFound: the attempt has no such rank.
    """
    if ranks is None:
        names = [path.stem.removeprefix("rank-") for path in attempt.logs.glob("rank-*.log")]
        return sorted(int(name) for name in names if name.isdigit())
    world = (read_json(attempt.description) or {}).get("world_size")
    logged = [rank for rank in ranks if attempt.rank_log(rank).exists()]
    for rank in ranks:
        if isinstance(world, int) and rank >= world and rank not in logged:
            raise NotFound(f"{run.name}: attempt {attempt.number} has ranks 0 to {world - 1}, not {rank}")
    return logged


def no_log(run: RunDir) -> NotFound:
    """Return the error for a run of which nothing was logged, and nothing will be."""
    return NotFound(f"{run.name}: no log yet; see why with `zslurm status {run.name}`")


def _log_path(run: RunDir, rank: int, attempt: int | None, supervisor: bool) -> Path | None:
    """Return the log that is asked for; None while it does not exist yet."""
    if supervisor:
        job = recorded_job(run)
        ids = [job_id for job_id in (job.successor, job.job_id) if job_id] if job else []
        return next((path for path in map(run.job_log, ids) if path.exists()), None)
    chosen = chosen_attempt(run, attempt)
    if chosen is None or not ranks_with_logs(run, chosen, [rank]):
        return None
    return chosen.rank_log(rank)


def print_logs(
    run: RunDir,
    *,
    rank: int,
    attempt: int | None,
    supervisor: bool,
    last_lines: int | None,
    since: float | None = None,
    follow: bool,
) -> None:
    """Print a log to standard output: a rank's, or with `supervisor` the job's own.

    Without `attempt` that of the newest, also when a newer one begins while following, until the run has ended; of
    what is there already only `last_lines`, and only lines written `since` then (UNIX seconds; of ranks only).

    Raises:
        NotFound: there is no such log, and none is to be expected.
    """
    path = _log_path(run, rank, attempt, supervisor)
    states = looks([run], follow=follow)
    if not next(states) and path is None:
        raise no_log(run)
    offset = _print_tail(path, last_lines, since, follow=follow) if path else 0
    if not offset and not follow and not supervisor:
        say(f"{run.name}: rank {rank} has printed nothing yet; `zslurm logs -f {run.name}` waits for it")
    for active in states:
        newest = _log_path(run, rank, attempt, supervisor)
        if newest is not None and newest != path:
            path, offset = newest, 0
        printed = _print_from(path, offset) if path else 0
        offset += printed
        if not active and not printed:
            break


def _print_tail(path: Path, last_lines: int | None, since: float | None, *, follow: bool) -> int:
    """Print the file, or its last lines; returns how far it was read."""
    with path.open("rb") as file:
        if since is not None:
            file.seek(_offset_at(path, since))
        block: bytes = file.read() if last_lines is None else b"".join(deque(file, maxlen=last_lines))
        end = file.tell()
    return end - _write(block, whole=follow)


def _offset_at(path: Path, since: float) -> int:
    """Return the offset of the first line of a rank's log written at a time or later."""
    times, offset = LogTimes(path, path.with_suffix(".times")), 0
    with path.open("rb") as file:
        for line in file:
            if times.of(offset + len(line)) >= since:
                break
            offset += len(line)
    return offset


def _print_from(path: Path, offset: int) -> int:
    with path.open("rb") as file:
        file.seek(offset)
        block = file.read()
    return len(block) - _write(block, whole=True)


def shown_on(out: TextIO, block: bytes) -> bytes:
    """Return bytes of a log as they are; for a terminal, sequences other than colours are written out."""
    return harmless(block.decode("utf-8", "replace"), log=True).encode() if out.isatty() else block


# A character of UTF-8 or a colour of which the end was not written yet.
_INCOMPLETE = re.compile(
    rb"(?:[\xc2-\xdf]|[\xe0-\xef][\x80-\xbf]?|[\xf0-\xf4][\x80-\xbf]{0,2}|\x1b(?:\[[0-9;:]*)?)\Z"
)


def incomplete_end(block: bytes) -> int:
    """Return how many bytes at the end of a log belong to a character or colour that is not complete yet."""
    match = _INCOMPLETE.search(block, max(0, len(block) - 64))
    return len(match[0]) if match else 0


def _write(block: bytes, *, whole: bool) -> int:
    """Print bytes of a log, on a terminal only `whole` characters and colours; return how many are left."""
    incomplete = incomplete_end(block) if whole and sys.stdout.isatty() else 0
    block = block[: len(block) - incomplete]
    if block:
        sys.stdout.buffer.write(shown_on(sys.stdout, block))
        sys.stdout.buffer.flush()
    return incomplete


_RANKS_PER_POLL = 64
"""Ranks that add a pause between two looks: each look asks the shared file system about every rank."""
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
    states = looks([run], follow=follow)
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
        time.sleep(POLL_S * (len(logs) // _RANKS_PER_POLL))


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


POLL_S = 0.5
STATE_EVERY_S = 3.0
"""Slurm is asked whether the runs are active at most this often."""


def looks(runs: Sequence[RunDir], *, follow: bool) -> Iterator[bool]:
    """Yield whether any of the runs is active: once at the start, and when following again for every look.

    A caller that follows prints what is new at each look, and stops when nothing is and the runs rest.
    """
    active, asked = follow and _any_active(runs), time.monotonic()
    yield active
    while follow:
        yield active
        if time.monotonic() - asked > STATE_EVERY_S:
            active, asked = _any_active(runs), time.monotonic()
        time.sleep(POLL_S if active else 0)


def _any_active(runs: Sequence[RunDir]) -> bool:
    return any(state.active for state in look_all(list(runs), cached=True))
