"""Print and follow one log of a run as it is: a rank's, or the job's own."""

from __future__ import annotations

import sys
import time
from collections import deque
from collections.abc import Sequence
from pathlib import Path

from zslurm.core.errors import NotFound
from zslurm.core.files import read_json
from zslurm.run.run_dir import AttemptDir, RunDir
from zslurm.run.state import look_all, recorded_job

_POLL_S = 0.3
_STATE_EVERY_S = 3.0


def chosen_attempt(run: RunDir, number: int | None) -> AttemptDir | None:
    """The attempt of a number, or the newest; None where there is none yet.

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


def ranks_with_logs(run: RunDir, attempt: AttemptDir, ranks: Sequence[int] | None) -> list[int]:
    """The ranks that have a log, of those asked for.

    Raises:
        NotFound: the attempt has no such rank.
    """
    world = (read_json(attempt.description) or {}).get("world_size")
    for rank in ranks or ():
        if isinstance(world, int) and rank >= world and not attempt.rank_log(rank).exists():
            raise NotFound(f"{run.name}: attempt {attempt.number} has ranks 0 to {world - 1}, not {rank}")
    if ranks is not None:
        return [rank for rank in ranks if attempt.rank_log(rank).exists()]
    names = [path.stem.removeprefix("rank-") for path in attempt.logs.glob("rank-*.log")]
    return sorted(int(name) for name in names if name.isdigit())


def is_active(run: RunDir) -> bool:
    """Whether more may be logged."""
    return look_all([run], cached=True)[0].active


def no_log(run: RunDir) -> NotFound:
    """What to say where nothing was logged, and nothing will be."""
    return NotFound(f"{run.name}: no log yet; `zslurm status {run.name}` says why")


def _log_path(run: RunDir, rank: int, attempt: int | None, supervisor: bool) -> Path | None:
    """The log that is asked for; None while it does not exist yet."""
    if supervisor:
        job = recorded_job(run)
        ids = [job_id for job_id in (job.successor, job.job_id) if job_id] if job else []
        return next((path for path in map(run.job_log, ids) if path.exists()), None)
    chosen = chosen_attempt(run, attempt)
    if chosen is None or not ranks_with_logs(run, chosen, [rank]):
        return None
    return chosen.rank_log(rank)


def print_logs(
    run: RunDir, *, rank: int, attempt: int | None, supervisor: bool, last_lines: int | None, follow: bool
) -> None:
    """Print a log to standard output.

    Args:
        run: the run.
        rank: whose output.
        attempt: which attempt; None for the newest, also when a newer one begins while following.
        supervisor: the job's own output instead.
        last_lines: only so many lines of what is there already.
        follow: go on until the run has ended.

    Raises:
        NotFound: there is no such log, and none is to be expected.
    """
    path = _log_path(run, rank, attempt, supervisor)
    active, asked = follow and is_active(run), time.monotonic()
    if path is None and not active:
        raise no_log(run)
    offset = _print_tail(path, last_lines) if path else 0
    while follow:
        newest = _log_path(run, rank, attempt, supervisor)
        if newest is not None and newest != path:
            path, offset = newest, 0
        printed = _print_from(path, offset) if path else 0
        offset += printed
        if not active and not printed:
            break
        if time.monotonic() - asked > _STATE_EVERY_S:
            active, asked = is_active(run), time.monotonic()
        time.sleep(_POLL_S)


def _print_tail(path: Path, last_lines: int | None) -> int:
    """Print the file, or its last lines; returns how far it was read."""
    with path.open("rb") as file:
        block: bytes = file.read() if last_lines is None else b"".join(deque(file, maxlen=last_lines))
        end = file.tell()
    _write(block)
    return end


def _print_from(path: Path, offset: int) -> int:
    with path.open("rb") as file:
        file.seek(offset)
        block = file.read()
    _write(block)
    return len(block)


def _write(block: bytes) -> None:
    if block:
        sys.stdout.buffer.write(block)
        sys.stdout.buffer.flush()
