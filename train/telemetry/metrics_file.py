"""Write RUN_DIR/metrics.jsonl: one JSON line for each step, checkpoint, evaluation and unusual event, by rank 0.

`docs/metrics.md` has every field of every kind of line, with its unit. Every line carries `kind`, `attempt` and
`time`. A restart repeats the steps after its checkpoint: of several lines with one step, the last counts.
"""

from __future__ import annotations

import errno
import logging
import os
import time
from collections import deque
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from zslurm.train.jsonl import JsonLinesWriter, read_jsonl
from zslurm.train.telemetry.observer import ObservedRun, Observer

_NAME = "metrics.jsonl"
_MOST_WAITING = 10_000
_LOG = logging.getLogger(__name__)


class MetricsFile(Observer):
    """Appends what is recorded."""

    def __init__(self, path: Path, attempt: int) -> None:
        """Open the file.

        Raises:
            OSError: it cannot be written.
        """
        self._attempt = attempt
        self._lines = JsonLinesWriter(path)
        self._full = False
        self._waiting: deque[dict[str, Any]] = deque(maxlen=_MOST_WAITING)

    @classmethod
    def create(cls, run: ObservedRun) -> MetricsFile | None:
        """Return the file of rank 0."""
        return cls(run.run_dir / _NAME, run.attempt) if run.world.is_first else None

    def recorded(self, kind: str, fields: Mapping[str, Any]) -> None:
        """Append one line; while the disk is full, lines wait in memory, the newest 10,000 of them.

        Raises:
            OSError: the file system is gone.
        """
        self._waiting.append({"kind": kind, "attempt": self._attempt, **fields, "time": time.time()})
        try:
            while self._waiting:
                self._lines.append(self._waiting[0])
                self._waiting.popleft()
        except OSError as error:
            if error.errno not in (errno.ENOSPC, errno.EDQUOT):
                raise
            if not self._full:
                _LOG.warning("metrics wait in memory: %s: %s", _NAME, os.strerror(error.errno))
        self._full = bool(self._waiting)

    def finish(self, give_up: Callable[[], bool]) -> None:
        """Close the file."""
        self._lines.close()


def last_attempt(run_dir: Path) -> int:
    """Return the highest attempt number in a run's metrics; 0 if there are none."""
    return max((int(row.get("attempt", 0)) for row in read_jsonl(run_dir / _NAME)), default=0)
