"""Keep an attempt's file of step work times up to date, from the progress that the agents report."""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import suppress

from zslurm.aegis.protocol import ProgressReport, Report
from zslurm.run.metrics.rank_times import RankTimes, write_rank_times
from zslurm.run.run_dir import AttemptDir

_EVERY_S = 10.0
"""Between two writes of the file, which is on the shared file system."""


class RankTimesWriter:
    """Averages each rank's own work over the steps between two writes."""

    def __init__(self, attempt: AttemptDir, every_s: float = _EVERY_S) -> None:
        """Know nothing yet."""
        self._attempt, self._every_s = attempt, every_s
        self._newest: dict[int, tuple[int, float]] = {}
        self._before: dict[int, tuple[int, float]] = {}
        self._seconds: dict[int, float] = {}
        self._written = time.monotonic()

    def feed(self, report: Report) -> None:
        """Take a report; only ranks' progress in this attempt counts."""
        if isinstance(report, ProgressReport) and report.ok and report.attempt == self._attempt.number:
            for row in report.ranks:
                if row.step >= 0:
                    self._newest[row.rank] = (row.step, row.work_s)

    def write_if_due(self, rank_nodes: Sequence[str], now: float) -> bool:
        """Write the file, unless that was done a moment ago or no rank has made a step; return whether it was."""
        if now - self._written < self._every_s:
            return False
        self._written, any_news = now, False
        for rank, (step, work_s) in self._newest.items():
            step_before, work_before = self._before.get(rank, (-1, 0.0))
            if step < step_before or work_s < work_before:  # it has gone back, or is another process
                step_before, work_before = -1, 0.0
            if step > step_before and work_s > work_before:
                self._seconds[rank] = (work_s - work_before) / (step - step_before)
                self._before[rank] = (step, work_s)
                any_news = True
        if not any_news:
            return False
        seconds = tuple(self._seconds.get(rank) for rank in range(len(rank_nodes)))
        with suppress(OSError):  # it is only looked at; whether the directory is lost is found out elsewhere
            write_rank_times(self._attempt, RankTimes(time.time(), tuple(rank_nodes), seconds))
        return True
