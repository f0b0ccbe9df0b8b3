"""Make Python's garbage collector stop all ranks at once instead of one after the other.

Left to itself it runs on each rank when that one has made enough objects, and everyone waits for it in the next
collective: with many ranks, some rank collects in nearly every step. Here it runs on no rank by itself, and on
all of them at the same step, every n steps. What was made before the first step (modules, the model, the
compiler's tables: hundreds of thousands of objects that live to the end) is frozen, so that a collection looks
only at what came since. In between, reference counts free nearly everything; what waits are cycles.
"""

from __future__ import annotations

import gc
from collections.abc import Mapping
from typing import Any, Self

from zslurm.train.schedule import Position, due
from zslurm.train.telemetry.observer import ObservedRun, Observer, StepResult
from zslurm.train.telemetry.timing import StepPart

_STEPS = 100
"""Steps between two collections."""


class GarbageControl(Observer):
    """Collects every `every` steps, and only then, inside of its `with` block; 0 leaves the collector as it is."""

    def __init__(self, every: int) -> None:
        """Prepare; the collector is as it was until the `with` block."""
        self._every = every
        self._was_enabled = False

    @classmethod
    def create(cls, run: ObservedRun) -> GarbageControl:
        """Return one for every rank."""
        return cls(_STEPS)

    def __enter__(self) -> Self:
        """Freeze what there is, and disable the collector."""
        if self._every:
            self._was_enabled = gc.isenabled()
            gc.collect()
            gc.freeze()
            gc.disable()
        return self

    def step_done(self, step: int, here: Position, result: StepResult, split: Mapping[StepPart, float]) -> None:
        """Collect if the step is one of those; the same on all ranks."""
        self.after_step(step)

    def after_step(self, step: int) -> None:
        """Collect if `step` is one of those."""
        if due(self._every, step):
            gc.collect()

    def __exit__(self, *failure: Any) -> None:
        """Give the collector back as it was found."""
        if self._every:
            gc.unfreeze()
            if self._was_enabled:
                gc.enable()
