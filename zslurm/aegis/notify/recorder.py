"""Write the events of a run, and notify hooks and the job's comment."""

from __future__ import annotations

import contextlib
import json
import logging
import threading
import time
from collections.abc import Mapping
from types import TracebackType
from typing import Any

from zslurm.aegis.notify.hooks import Notifier
from zslurm.aegis.notify.job_comment import JobComment
from zslurm.config.spec import RunSpec
from zslurm.core.redact import redact_mapping
from zslurm.run.events import NotifyFailed
from zslurm.run.events.event import Event, from_row
from zslurm.run.run_dir import RunDir
from zslurm.run.state.state_events import WORTH_KEEPING, keep_state_events
from zslurm.train.jsonl import JsonLinesWriter

_LOG = logging.getLogger(__name__)

_FLUSH_S = 5.0
"""How long hooks and Slurm get to take what is left when the supervisor ends, or the job is requeued."""


class Recorder:
    """The one writer of events.jsonl. Use as a context manager.

    What cannot be written, because the disk is full, waits for the next event; the log of the job, which is on
    the same disk, goes without it: the supervisor is needed most when something is wrong.
    """

    def __init__(self, run: RunDir) -> None:
        self._run = run
        self._lock = threading.Lock()
        self._unwritten: list[dict[str, Any]] = []
        self._notifiers: list[Notifier | JobComment] = []
        self._job_id = ""
        self._kept = 0  # bytes of the file when its state-changing rows were kept last

    def open(self, spec: RunSpec, job_id: str, environ: Mapping[str, str]) -> None:
        """Know the job, and whom to notify."""
        self._job_id = job_id
        self._notifiers.append(
            Notifier(spec.aegis.notify, self._run.name, self._run.path, environ=environ, failed=self._failed)
        )
        if spec.cluster.launcher == "slurm" and spec.aegis.comment:
            self._notifiers.append(JobComment(job_id, environ, self._failed))

    def record(self, event: Event) -> None:
        """Record an event, in the events and in the log of the job. Any thread may."""
        fields = redact_mapping(event.fields())
        row = {"time": time.time(), "event": event.NAME, "job_id": self._job_id, **fields}
        made = from_row(row)
        with self._lock:
            self._unwritten.append(row)
            with contextlib.suppress(OSError):
                while self._unwritten:
                    self._file.append(self._unwritten[0])
                    del self._unwritten[0]
                if self._file.size() - self._kept > WORTH_KEEPING:
                    self._kept = self._file.size()
                    keep_state_events(self._run.events)
        for notifier in self._notifiers:
            notifier.notify(made)
        shown = " ".join(f"{key}={json.dumps(value)}" for key, value in fields.items() if value is not None)
        _LOG.info("%s", f"{event.NAME} {shown}".rstrip())

    def flush(self) -> None:
        """Deliver what was recorded, for a few seconds at most: before a requeue ends this process."""
        for notifier in self._notifiers:
            notifier.flush(_FLUSH_S)

    def _failed(self, reason: str) -> None:
        self.record(NotifyFailed(reason=reason))

    def __enter__(self) -> Recorder:
        self._file = JsonLinesWriter(self._run.events)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for notifier in self._notifiers:
            notifier.close(_FLUSH_S)
        with self._lock, contextlib.suppress(OSError):
            self._file.close()
