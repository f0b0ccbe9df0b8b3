"""What the training loop asks of a recovery, and a run without one: every answer is that nothing happens."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

from torch import Tensor

from zslurm.train.checkpointing.snapshot import Snapshot
from zslurm.train.checkpointing.writer import CheckpointWriter
from zslurm.train.errors import TrainError
from zslurm.train.model.zaya import Zaya
from zslurm.train.optim.sharded import OwnedState
from zslurm.train.parallel.world import World
from zslurm.train.recovery.copies.staging import Slot
from zslurm.train.recovery.facts import Facts
from zslurm.train.recovery.resplit import Owned

T = TypeVar("T")


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


@dataclass(frozen=True)
class HandedOver:
    """What a trainer leaves to the one that takes its place, in this process, among another number of ranks.

    Attributes:
        model: the model, as it was compiled.
        world: of the old trainer.
        owned: returns what a rank owned, by its former number.
        writers: of checkpoints, which may still be at work on saves that were given up.
        save: whether a save was due or in progress.
    """

    model: Zaya
    world: World
    owned: Callable[[int], Owned]
    writers: Sequence[CheckpointWriter]
    save: bool


@dataclass(frozen=True)
class Refilled:
    """What a step needs besides masters and optimizer state, where these were filled from copies.

    Attributes:
        cursor, extras: as `Trainer.capture` returned them.
        crc: of all that must be the same on every rank.
        save: whether a save was due, or in progress.
    """

    cursor: dict[str, Any]
    extras: Mapping[str, Tensor]
    crc: int
    save: bool


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

    def recover(self, trainer: Trainer) -> bool:
        """Regroup and go back; returns False where the number of ranks changes, see `resize`.

        Raises:
            RecoveryFailed: that is not possible.
        """
        return True

    def resize(self, left: HandedOver, make: Callable[[World], T]) -> T:
        """Have `make` make a trainer among another number of ranks.

        Raises:
            RecoveryFailed: that is not possible.
        """
        raise RecoveryFailed("recovery: the number of ranks cannot change")

    def refill(
        self,
        trainer: Trainer,
        states: Sequence[OwnedState],
        former: Callable[[int], Owned],
        now: Callable[[int], Owned],
    ) -> Refilled:
        """Fill `states` from the copies of the ranks that there were before.

        Args:
            trainer: among the ranks that are left.
            states: its states.
            former: returns what a rank owned before.
            now: returns what a rank owns.

        Raises:
            RecoveryFailed: the copies are not whole.
        """
        raise RecoveryFailed("recovery: the number of ranks cannot change")

    def close(self) -> None:
        """Watch no longer."""
