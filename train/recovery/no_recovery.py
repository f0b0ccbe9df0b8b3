"""What the training loop asks of a recovery, and a run without one: every answer is that nothing happens."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Protocol

from torch import Tensor

from zslurm.train.checkpointing.snapshot import Snapshot
from zslurm.train.errors import TrainError
from zslurm.train.parallel.world import World
from zslurm.train.recovery.facts import Facts
from zslurm.train.recovery.staging import Slot


class RecoveryFailed(TrainError):
    """There is no way on in memory; the message states why."""


class Trainer(Protocol):
    """What a recovery needs of the trainer of a rank."""

    step: int
    world: World

    def capture(self) -> tuple[dict[str, Any], dict[str, Tensor]]:
        """Return what a copy needs beside masters and optimizer state: plain JSON, and small tensors."""
        ...

    def leave(self) -> bool:
        """Let go of the old groups; return whether a save was due or in progress."""
        ...

    def rejoin(self) -> None:
        """Make the groups of this generation beside that of all ranks, and continue over them."""
        ...

    def go_back(self, slot: Slot, *, save: bool) -> None:
        """Restore a step, after which a save is due with `save`."""
        ...

    def compare(self, crc: int) -> None:
        """Gather the weights; raise TrainError where ranks hold different ones, or have another `crc`."""
        ...


class NoRecovery:
    """A run without recovery in memory: nothing is copied, and every error is the end of the rank."""

    enabled = False
    facts: Facts | None = None

    def making_groups(self) -> AbstractContextManager[None]:
        """Note the groups that are made in the block."""
        return nullcontext()

    def prepare(
        self, trainer: Trainer, live: Mapping[str, Tensor], facts: Facts, *, saves: bool
    ) -> Callable[[Callable[[], bool]], Snapshot] | None:
        """Get ready to copy; return what makes a source of saves out of the copies."""
        return None

    def busy(self) -> float:
        """Return this rank's number in the sums of a step: 1 while its last copy is not whole."""
        return 0.0

    def moving(self) -> float:
        """Return this rank's number in the sums of a step: 1 where it knows of a planned move."""
        return 0.0

    def agree(self, busy: float, moving: float) -> None:
        """Take the sums of these numbers."""

    def copy(self, trainer: Trainer) -> None:
        """Begin a copy at a step's boundary, where one is due."""

    def wait_for_copy(self) -> float:
        """Wait, before the optimizer changes the state, until the copy has it; returns the seconds waited."""
        return 0.0

    def fence(self) -> None:
        """Return only in a process that has not been replaced."""

    def enter(self) -> int:
        """Return the number of the generation that this process begins in."""
        return 0

    def save_with(self, give_up: Callable[[], None]) -> None:
        """Call `give_up` where ranks are lost, so that no save waits for them."""

    def begin(self, trainer: Trainer) -> None:
        """Begin to train."""

    def may_recover(self, error: BaseException) -> bool:
        """Return whether a new generation follows on an error; waits for it where peers may be gone."""
        return False

    def recover(self, trainer: Trainer) -> None:
        """Regroup and go back.

        Raises:
            RecoveryFailed: that is not possible.
        """

    def close(self) -> None:
        """Watch no longer."""
