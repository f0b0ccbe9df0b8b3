"""Print and follow the logs of a run."""

from __future__ import annotations

import sys
import time
from collections import deque
from pathlib import Path

from zslurm.errors import NotFound
from zslurm.launch.run_dir import RunDir, read_json
from zslurm.launch.run_state import last_job, look

_POLL_S = 0.3
_STATE_EVERY_S = 3.0


def _log_path(run: RunDir, rank: int, attempt: int | None, supervisor: bool) -> Path | None:
    """The log that is asked for; None while it does not exist yet."""
    if supervisor:
        job = last_job(run)
        path = run.job_log(job.job_id) if job else None
        return path if path is not None and path.exists() else None
    attempts = run.attempt_dirs()
    if attempt is not None:
        attempts = [found for found in attempts if found.number == attempt]
        if not attempts:
            raise NotFound(f"{run.name}: there is no attempt {attempt}")
    if not attempts:
        return None
    path = attempts[-1].rank_log(rank)
    if path.exists():
        return path
    ranks = (read_json(attempts[-1].description) or {}).get("world_size")
    if ranks is not None and rank >= ranks:
        raise NotFound(f"{run.name}: attempt {attempts[-1].number} has ranks 0 to {ranks - 1}, not {rank}")
    return None


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
    if path is None and not (follow and look(run).active):
        raise NotFound(f"{run.name}: no log yet; `zslurm status {run.name}` says why")
    offset = _print_tail(path, last_lines) if path else 0
    active, asked = follow and look(run).active, time.monotonic()
    while follow:
        newest = _log_path(run, rank, attempt, supervisor)
        if newest is not None and newest != path:
            path, offset = newest, 0
        printed = _print_from(path, offset) if path else 0
        offset += printed
        if not active and not printed:
            break
        if time.monotonic() - asked > _STATE_EVERY_S:
            active, asked = look(run).active, time.monotonic()
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
