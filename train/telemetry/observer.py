"""Define what watches a run: one small protocol, one file for each observer.

An observer reads what the loop hands it and changes nothing in the training. To add one, write a subclass of
`Observer` in a file of this folder and add it to `OBSERVERS` in observers.py; the loop stays as it is. Every
method has a default, so an observer has those that it needs.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from torch import Tensor

from zslurm.train.config import TrainConfig
from zslurm.train.data.order import SourceProgress
from zslurm.train.jsonl import Record
from zslurm.train.parallel.world import World
from zslurm.train.schedule import Position
from zslurm.train.telemetry.timing import StepPart


@dataclass(frozen=True)
class StepResult:
    """What one optimizer step did; the same on every rank."""

    loss: float  # mean cross-entropy of the step's targets, in nats
    z_loss: float  # mean z-loss of the step's targets, with its weight; 0 without one
    grad_norm: float  # global norm of the gradient, before clipping
    counts_LC: Tensor  # choices of each router class in each layer, on the host
    stop: bool  # some rank was asked to stop
    taken: bool  # the weights were updated; false where the step was skipped


@dataclass(frozen=True)
class ObservedRun:
    """What an observer may know of the run when it is made."""

    run_dir: Path  # the run's directory
    config: TrainConfig  # its configuration
    world: World  # who takes part
    attempt: int  # number of this start, from 1
    done: int  # steps that a checkpoint brought along
    total_steps: int  # steps of the whole run
    record: Record  # writes a line of metrics.jsonl, which all observers see
    sources: Callable[[int], Mapping[str, SourceProgress]]  # what that number of steps took of each source


class Observer:
    """Watches a run. All ranks make the same observers and call them at the same points."""

    @staticmethod
    def check(config: TrainConfig) -> None:
        """Refuse a configuration that cannot be observed; called before anything is built.

        Raises:
            ConfigError: naming the key.
        """

    @classmethod
    def create(cls, run: ObservedRun) -> Observer | None:
        """Return the observer of this rank; None if it has nothing to do. All ranks call it together."""
        raise NotImplementedError

    def __enter__(self) -> Self:
        """Enter: training begins."""
        return self

    def __exit__(self, *failure: Any) -> None:
        """Leave: training has ended, or failed (three arguments, as every context manager gets)."""

    def step_done(self, step: int, here: Position, result: StepResult, split: Mapping[StepPart, float]) -> None:
        """Observe a step: its number from 1, its place in the run, what it did, and its seconds in each part."""

    def recorded(self, kind: str, fields: Mapping[str, Any]) -> None:
        """Observe a line of metrics: a step, a skipped step, an evaluation, a state of a save, and so on."""

    def needs_checkpoint(self) -> bool:
        """Return whether to make a checkpoint after the step that was observed last; the same on all ranks."""
        return False

    def checkpoint_requested(self, step: int) -> None:
        """Observe that a save begins."""

    def checkpoint_committed(self, step: int, path: Path) -> None:
        """Observe that a checkpoint is complete."""

    def checkpoints_in_use(self) -> frozenset[int]:
        """Return the steps whose checkpoints must stay for now."""
        return frozenset()

    def finish(self, give_up: Callable[[], bool]) -> None:
        """End after the run has ended in order; other ranks may have left. Wait until `give_up()` at most."""
