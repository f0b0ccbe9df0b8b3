"""Print and follow one log of a run as it is: a rank's, or the job's own."""

from __future__ import annotations

import re
import sys
from collections import deque
from collections.abc import Sequence
from pathlib import Path
from typing import TextIO

from zslurm.cli.run.polling import looks
from zslurm.core.console import harmless, say
from zslurm.core.errors import NotFound
from zslurm.core.files import read_json
from zslurm.run.log_times import LogTimes
from zslurm.run.run_dir import AttemptDir, RunDir
from zslurm.run.state.run_state import recorded_job


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
