"""How fast ranks are, measured as they train, so that a slow one gets fewer sequences (train/data/shares.py).

With `parallel.uneven_shares_every: N`, ranks exchange in every N-th step what a sequence took them since the last
exchange, in the sums that the step needs anyway. All see the same numbers, and divide the batch by the same speeds
from the next step on. A rank counts as slow or fast where it differs from the median by more than a tolerance, and
speeds are rounded, so that noise seldom changes the division. A checkpoint records them.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence

TOLERANCE = 0.05
"""A rank that takes so much longer or shorter than the median counts as equally fast; also the unit of speeds."""

_SLOWEST, _FASTEST = 0.25, 2.0
"""Bounds of a speed, in the median's: one wrong measurement must not empty a rank, or give it the whole batch."""


class Pace:
    """One rank's view of the speeds.

    Attributes:
        speeds: of every rank, the median's being 1; None: all are equally fast.
    """

    def __init__(self, every: int, rank: int, world_size: int) -> None:
        """Measure in every `every`-th step, from the first on; never where it is 0."""
        self._every, self._rank, self._world_size = every, rank, world_size
        self._seconds, self._sequences = 0.0, 0
        self.speeds: tuple[float, ...] | None = None

    @property
    def described(self) -> str:
        """Return how the batch is divided, and which rank is the slowest."""
        if self.speeds is None:
            return "all ranks have equal shares of the batch"
        slowest = min(self.speeds)
        return (
            f"the batch is divided by speed: rank {self.speeds.index(slowest)} has {slowest:.2f} of the median's"
        )

    def add(self, seconds: float, sequences: int) -> None:
        """Add a step of this rank: seconds of work, without waits for peers, and sequences that it computed."""
        if sequences:
            self._seconds, self._sequences = self._seconds + seconds, self._sequences + sequences

    def signals(self, step: int) -> list[float]:
        """Return this rank's part of the sums of step `step`, from 0; nothing where it is not the time."""
        if not self._every or (step + 1) % self._every:
            return []
        found = [0.0] * self._world_size
        found[self._rank] = self._seconds / self._sequences if self._sequences else 0.0
        self._seconds, self._sequences = 0.0, 0
        return found

    def agree(self, sums: Sequence[float]) -> None:
        """Take the sums over the ranks, of what `signals` returned."""
        if sums:
            self.speeds = speeds_of(sums)

    def resume(self, speeds: object) -> None:
        """Take the speeds that a checkpoint recorded; those of another number of ranks are of no use."""
        if self._every and isinstance(speeds, list) and len(speeds) == self._world_size:
            self.speeds = tuple(map(float, speeds))


def speeds_of(seconds: Sequence[float]) -> tuple[float, ...] | None:
    """Return the speeds of ranks that take so many seconds for a sequence; None where all are equally fast.

    A rank that computed none (0 seconds) counts as equally fast, so that it gets some and is measured again.
    """
    measured = [each for each in seconds if each > 0]
    if not measured:
        return None
    median = statistics.median(measured)
    speeds = []
    for each in seconds:
        speed = median / each if each > 0 else 1.0
        inside = 1 - TOLERANCE <= speed <= 1 + TOLERANCE
        bounded = min(_FASTEST, max(_SLOWEST, speed))
        speeds.append(1.0 if inside else round(bounded / TOLERANCE) * TOLERANCE)
    return tuple(speeds) if len(set(speeds)) > 1 else None
