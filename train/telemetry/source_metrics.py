"""Report what was trained on of each source: a line of metrics at every tenth step, and at the last one.

The counts follow from the run's order (train/data/order.py), a function of the step: nothing is counted while
training, and a resumed run continues them without having stored any.
"""

from __future__ import annotations

from collections.abc import Mapping

from zslurm.train.data.order import SourceProgress
from zslurm.train.schedule import Position
from zslurm.train.telemetry.observer import ObservedRun, Observer, StepResult
from zslurm.train.telemetry.timing import StepPart

_EVERY = 10
"""Steps between two lines; a reader of the newest one reads no further back than ten steps."""


def no_sources(done: int) -> Mapping[str, SourceProgress]:
    """Return the sources of a run that has none with names."""
    return {}


class SourceMetrics(Observer):
    """Records tokens and epochs of each source."""

    def __init__(self, run: ObservedRun) -> None:
        """Record the sources of `run`."""
        self._run = run

    @classmethod
    def create(cls, run: ObservedRun) -> SourceMetrics | None:
        """Return the observer of rank 0."""
        return cls(run) if run.world.is_first else None

    def step_done(self, step: int, here: Position, result: StepResult, split: Mapping[StepPart, float]) -> None:
        """Record the sources after the step, also a skipped one; with data.path the source is called `data`."""
        if step % _EVERY and step != self._run.total_steps:
            return
        sources = {
            name or "data": {"tokens": taken.tokens, "epochs": round(taken.epochs, 6)}
            for name, taken in self._run.sources(step).items()
        }
        self._run.record("sources", step=step, phase=here.phase.name, sources=sources)
