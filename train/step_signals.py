"""What ranks sum in each step besides gradients, and how others take part in the steps of the loop."""

from __future__ import annotations

from typing import NamedTuple, Protocol

from torch import Tensor


class MicrobatchSums(NamedTuple):
    """Sums over a rank's microbatches.

    Attributes:
        losses: cross entropy and z-loss, summed over targets: [2] fp64.
        counts_MLC: choices of the routers, by share of the step, layer and class.
        targets: tokens whose losses count.
    """

    losses: Tensor
    counts_MLC: Tensor
    targets: int


class StepSignals(NamedTuple):
    """One rank's numbers, or their sums over all ranks: counts, or on how many ranks something holds.

    Attributes:
        targets: tokens whose losses count.
        stop: ranks that were asked to stop.
        saving: ranks that have not finished the last save: the one that is due waits, training does not.
        overdue: ranks on which that save has taken longer than LONGEST_DELAY_S: now training waits.
        failed_saves: saves that failed in a row, as rank 0 counts.
        copying: ranks whose last copy for recovery in memory is not complete.
        moving: ranks that know of a planned move.
        changed: ranks whose masters or moments changed in memory.
    """

    targets: float
    stop: float
    saving: float = 0.0
    overdue: float = 0.0
    failed_saves: float = 0.0
    copying: float = 0.0
    moving: float = 0.0
    changed: float = 0.0


class StepCallback(Protocol):
    """Takes part in each step: adds its numbers to the signals, and acts on the sums as every other rank does."""

    def add_signals(self, signals: StepSignals) -> StepSignals:
        """Return the signals of this rank with the callback's."""
        ...

    def agree(self, sums: StepSignals) -> None:
        """Take the sums over all ranks, from which every rank draws the same conclusions."""
        ...

    def before_update(self) -> None:
        """Wait until the optimizer may change masters and moments."""
        ...
