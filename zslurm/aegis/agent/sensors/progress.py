"""The progress of the ranks of an attempt on this node, from the records that they keep (train/progress.py)."""

from __future__ import annotations

import re
import time
from collections.abc import Callable
from pathlib import Path

from zslurm.aegis.protocol import RankProgress
from zslurm.core.processes import read_stat
from zslurm.train.progress import Progress, read_progress

_RECORD = re.compile(r"rank-(\d{5,})")


def records(directory: Path) -> list[Progress]:
    """Return the records in a directory, by rank; without those that are truncated or of another version.

    Nothing if there is no directory: no rank has started yet, or the last one has left.

    Raises:
        OSError: the directory is there and cannot be read.
    """
    try:
        names = [entry.name for entry in directory.iterdir()]
    except FileNotFoundError:
        return []
    ranks = sorted(int(match[1]) for name in names if (match := _RECORD.fullmatch(name)))
    return [record for rank in ranks if (record := read_progress(directory, rank)) and record.rank == rank]


def ranks_in(
    directory: Path,
    now_ns: int | None = None,
    paused_since: Callable[[float], float] = lambda _when: 0.0,
    is_gone: Callable[[int], bool] = lambda _pid: False,
) -> tuple[RankProgress, ...]:
    """Return the records as they are reported.

    Args:
        directory: see `AttemptDir.progress`.
        now_ns: the monotonic clock, which all processes of a node share; default: now.
        paused_since: seconds for which the job was suspended after a time; they count for no rank's age.
        is_gone: whether the process of a rank has ended; see `RankProcesses`.

    Raises:
        OSError: the directory is there and cannot be read.
    """
    progress_records = records(directory)
    now_ns = time.monotonic_ns() if now_ns is None else now_ns  # after the reading: no age is negative
    return tuple(
        RankProgress(
            record.rank, record.pid, record.phase, record.step, record.committed_step,
            round(_age_s(record, now_ns, paused_since), 2), record.waiting, round(record.work_ns / 1e9, 4),
            _is_halted(record.pid), is_gone(record.pid),
        )
        for record in progress_records
    )  # fmt: skip


def _age_s(record: Progress, now_ns: int, paused_since: Callable[[float], float]) -> float:
    return max(0.0, (now_ns - record.monotonic_ns) / 1e9 - paused_since(record.monotonic_ns / 1e9))


def _is_halted(pid: int) -> bool:
    stat = read_stat(Path(f"/proc/{pid}"))
    return stat is not None and stat[1][0] in "Tt"
