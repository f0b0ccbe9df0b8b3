"""Functions that tests submit through submitit: a job imports them by the name of this module, as a user's."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

import submitit


def surroundings(*names: str) -> dict[str, Any]:
    """Return what a task sees of its job, and some variables."""
    job = submitit.JobEnvironment()
    return {
        "cluster": job.cluster,
        "job_id": job.job_id,
        "rank": job.global_rank,
        "tasks": job.num_tasks,
        "nodes": len(job.hostnames),
        "directory": str(Path.cwd()),
        **{name: os.environ.get(name) for name in names},
    }


def add(first: int, second: int) -> int:
    """Add."""
    return first + second


def fail(why: str) -> None:
    """Raise."""
    raise ValueError(why)


def endless() -> None:
    """Wait to be ended."""
    time.sleep(3600)


class Counter:
    """Counts to a number, slowly until it has started again once; its checkpoint is how far it is."""

    def __init__(self, marks: str, reached: int = 0, starts: int = 0) -> None:
        self.marks, self.reached, self.starts = marks, reached, starts

    def __call__(self, goal: int) -> dict[str, int]:
        """Count, and leave a mark at each number."""
        self.starts += 1
        while self.reached < goal:
            if self.starts == 1 and self.reached == goal - 1:
                time.sleep(3600)  # until a signal ends it
            time.sleep(0.02)
            self.reached += 1
            Path(self.marks).write_text(str(self.reached))
        return {"reached": self.reached, "starts": self.starts}

    def checkpoint(self, goal: int) -> submitit.helpers.DelayedSubmission:
        """Return the call that continues."""
        return submitit.helpers.DelayedSubmission(Counter(self.marks, self.reached, self.starts), goal)
