"""List the observers of a run, and hand each of them what the loop reports."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from zslurm.train.config import TrainConfig
from zslurm.train.data.order import SourceProgress
from zslurm.train.parallel.world import World
from zslurm.train.schedule import Position
from zslurm.train.telemetry.evaluation_command import EvaluationCommand
from zslurm.train.telemetry.gc_control import GarbageControl
from zslurm.train.telemetry.metrics_file import MetricsFile
from zslurm.train.telemetry.observer import ObservedRun, Observer, StepResult
from zslurm.train.telemetry.profiler import Profiler
from zslurm.train.telemetry.source_metrics import SourceMetrics, no_sources
from zslurm.train.telemetry.step_metrics import StepMetrics
from zslurm.train.telemetry.timing import StepPart
from zslurm.train.telemetry.trackers.feed import Trackers

OBSERVERS: tuple[type[Observer], ...] = (
    MetricsFile,
    Trackers,
    StepMetrics,
    SourceMetrics,
    EvaluationCommand,
    Profiler,
    GarbageControl,
)
"""In this order they observe; in the opposite one they end, so that what is recorded last is still written."""


def check_observers(config: TrainConfig) -> None:
    """Refuse a run that cannot be observed as configured.

    Raises:
        ConfigError: naming the key.
    """
    for kind in OBSERVERS:
        kind.check(config)


class Observers:
    """The observers of one rank."""

    def __init__(
        self,
        run_dir: Path,
        config: TrainConfig,
        world: World,
        *,
        attempt: int,
        done: int,
        total_steps: int,
        sources: Callable[[int], Mapping[str, SourceProgress]] = no_sources,
    ) -> None:
        """Make them; all ranks together. The arguments are as in `ObservedRun`."""
        self._all: list[Observer] = []
        run = ObservedRun(run_dir, config, world, attempt, done, total_steps, self.record, sources)
        for kind in OBSERVERS:
            observer = kind.create(run)
            if observer is not None:
                self._all.append(observer)

    def __enter__(self) -> Observers:
        """Enter them: training begins."""
        with contextlib.ExitStack() as opening:
            for observer in self._all:
                opening.enter_context(observer)
            self._open = opening.pop_all()
        return self

    def __exit__(self, *failure: Any) -> None:
        """Leave them: training has ended, or failed."""
        self._open.__exit__(*failure)

    def record(self, kind: str, **fields: Any) -> None:
        """Report a line of metrics."""
        for observer in self._all:
            observer.recorded(kind, fields)

    def step_done(self, step: int, here: Position, result: StepResult, split: Mapping[StepPart, float]) -> None:
        """Report a step."""
        for observer in self._all:
            observer.step_done(step, here, result, split)

    def need_checkpoint(self) -> bool:
        """Return whether any of them needs a checkpoint after this step."""
        return any(observer.needs_checkpoint() for observer in self._all)

    def checkpoint_requested(self, step: int) -> None:
        """Report that a save begins."""
        for observer in self._all:
            observer.checkpoint_requested(step)

    def checkpoint_committed(self, step: int, path: Path) -> None:
        """Report that a checkpoint is complete."""
        for observer in self._all:
            observer.checkpoint_committed(step, path)

    def checkpoints_in_use(self) -> set[int]:
        """Return the steps whose checkpoints must stay for now."""
        return {step for observer in self._all for step in observer.checkpoints_in_use()}

    def finish(self, *, give_up: Callable[[], bool]) -> None:
        """End them; see `Observer.finish`."""
        for observer in reversed(self._all):
            observer.finish(give_up)
