"""Feed the trackers from rank 0, in a thread for each: no tracker stalls or ends a run.

The loop only puts the numbers of a line into a queue. What goes wrong in a tracker (no network, no credentials, a
full disk, a service that is down) is one line of the log; this tracker then gets nothing more, and training and
metrics.jsonl do not notice. A tracker that is slower than the training loses lines once its queue is full, and the
log has their number.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from queue import Empty, Full, Queue
from typing import Any

from zslurm.checkpoint_tools.plain import reason_of, shorten
from zslurm.checkpoint_tools.quantities import counted
from zslurm.train.config import TrainConfig
from zslurm.train.telemetry.observer import ObservedRun, Observer
from zslurm.train.telemetry.trackers.mlflow import MLflow
from zslurm.train.telemetry.trackers.prometheus import Prometheus
from zslurm.train.telemetry.trackers.tensorboard import TensorBoard
from zslurm.train.telemetry.trackers.tracker import TrackedRun, Tracker, scalars
from zslurm.train.telemetry.trackers.trackio import Trackio
from zslurm.train.telemetry.trackers.wandb import Wandb

_LOG = logging.getLogger(__name__)
TRACKERS: tuple[type[Tracker], ...] = (TensorBoard, Wandb, MLflow, Trackio, Prometheus)
LONGEST_QUEUE = 10_000
"""Lines that wait for a tracker: a network that is down for some minutes loses nothing."""
FINISH_S = 60.0
"""How long the end of a run waits for each tracker at most."""


class Trackers(Observer):
    """Hands lines of metrics to the trackers that are on."""

    def __init__(
        self, run: TrackedRun, kinds: Mapping[type[Tracker], bool], *, finish_s: float = FINISH_S
    ) -> None:
        """Start a thread for each of the trackers; the values state whether it is online."""
        self._finish_s = finish_s
        self._feeds = [Feed(kind, replace(run, online=online)) for kind, online in kinds.items()]

    @staticmethod
    def check(config: TrainConfig) -> None:
        """Refuse trackers whose packages are not installed. Every rank asks; only rank 0 writes.

        Raises:
            ConfigError: naming the key and the extra.
        """
        for kind in TRACKERS:
            kind.check(config.metrics)

    @classmethod
    def create(cls, run: ObservedRun) -> Trackers | None:
        """Return the observer of rank 0, if any tracker is on."""
        modes = {kind: kind.mode(run.config.metrics) for kind in TRACKERS}
        modes_online = {kind: mode == "online" for kind, mode in modes.items() if mode != "off"}
        if not run.world.is_first or not modes_online:
            return None
        config, name = run.config.model_dump(mode="json"), run.config.run.name
        project = run.config.metrics.project
        return cls(TrackedRun(run.run_dir, name, project, config, run.attempt, run.done + 1, False), modes_online)

    def recorded(self, kind: str, fields: Mapping[str, Any]) -> None:
        """Queue the numbers of a line that belongs to a step."""
        if "step" not in fields:
            return
        values = dict(scalars(kind, {key: value for key, value in fields.items() if key != "step"}))
        for feed in self._feeds:
            feed.put(int(fields["step"]), values)

    def finish(self, give_up: Callable[[], bool]) -> None:
        """Let the trackers write what is left, for a limited time."""
        for feed in self._feeds:
            feed.close()
        deadline = time.monotonic() + self._finish_s
        for feed in self._feeds:
            feed.wait(lambda: give_up() or time.monotonic() > deadline)


class Feed:
    """The thread of one tracker, and its queue."""

    def __init__(self, kind: type[Tracker], run: TrackedRun, *, longest: int = LONGEST_QUEUE) -> None:
        """Start it. The tracker is opened in the thread, because that may take as long as a network does."""
        self._kind, self._run = kind, run
        self._lines: Queue[tuple[int, Mapping[str, float]] | None] = Queue(longest)
        self._dropped, self._closing, self._failed = 0, threading.Event(), False
        self._thread = threading.Thread(target=self._work, name=f"tracker-{kind.KEY}", daemon=True)
        self._thread.start()

    def put(self, step: int, values: Mapping[str, float]) -> None:
        """Queue the numbers of a step; never waits."""
        if self._failed:
            return
        try:
            self._lines.put_nowait((step, values))
        except Full:
            if not self._dropped:
                _LOG.info(
                    "metrics.%s: it does not keep up; lines are left out from step %d on", self._kind.KEY, step
                )
            self._dropped += 1

    def close(self) -> None:
        """Let the thread end once it has written what is queued."""
        self._closing.set()
        with contextlib.suppress(Full):
            self._lines.put_nowait(None)

    def wait(self, give_up: Callable[[], bool]) -> None:
        """Wait until the thread has ended, or until `give_up()`."""
        while self._thread.is_alive() and not give_up():
            self._thread.join(0.05)
        if self._thread.is_alive():
            _LOG.info("metrics.%s: it did not end in time; what it had not written is lost", self._kind.KEY)
        if self._dropped:
            _LOG.info("metrics.%s: %s left out", self._kind.KEY, counted(self._dropped, "line was", "lines were"))

    def _work(self) -> None:
        try:
            tracker = self._kind(self._run)
            while True:
                try:
                    line = self._lines.get(timeout=1.0)
                except Empty:
                    if self._closing.is_set():
                        break
                    continue
                if line is None:
                    break
                tracker.log(*line)
            tracker.finish()
        except BaseException as error:  # SystemExit too: a service's client must not end a rank
            self._failed = True
            _LOG.info("metrics.%s is off from here on: %s", self._kind.KEY, _in_one_line(error))


def _in_one_line(error: BaseException) -> str:
    text = reason_of(error) if isinstance(error, OSError) else str(error)
    return shorten(" ".join(f"{type(error).__name__}: {text}".split()))
