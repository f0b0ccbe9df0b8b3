"""How the sequences of a step are divided among its data-parallel ranks.

Equal shares (the default), of B sequences in M = B / m microbatches on R ranks, at most C = ceil(B / R) a rank:

    whole    where whole microbatches get by with C sequences a rank, rank r computes r, r + R, r + 2R, ...
    split    else every rank computes floor(C / m) whole ones in that order, and what is left over is split:
             a rank gets some sequences of one of them, or (where there is no other way) of two neighbours

Where R divides M it is always the first. 1,016 ranks of 1,024 with B = 4,096 and m = 4 are the second: one whole
microbatch each, and the 32 sequences of the last eight go to 32 ranks, which then have 5. In whole microbatches
eight ranks would have 8, and the step would take twice as long instead of 1.25 times.

With speeds (sequences per time, on any scale) the shares are those whose slowest rank is done soonest. Everything
follows from the arguments by exact arithmetic: all ranks find the same division without asking each other.

A step has the same sequences in the same microbatches at any number of ranks and any speeds; only which rank
computes a sequence, and so the order of sums, differs. Nothing here imports torch.
"""

from __future__ import annotations

import heapq
import itertools
import math
from dataclasses import dataclass
from fractions import Fraction
from functools import cached_property, lru_cache
from typing import NamedTuple

from zslurm.checkpoint_tools.quantities import counted
from zslurm.train.schedule import Position


class Piece(NamedTuple):
    """Sequences of one microbatch that a rank runs forward and backward at once: all of them, or some.

    Attributes:
        number: the microbatch's place among those of the step.
        first: the first sequence, counted in the microbatch.
        last: one past the last sequence, counted in the microbatch.
    """

    number: int
    first: int
    last: int

    @property
    def sequences(self) -> int:
        """Return how many sequences these are."""
        return self.last - self.first


@dataclass(frozen=True)
class Shares:
    """The division of `sequences`, in microbatches of `micro_batch`, among `ranks` data-parallel ranks.

    Attributes:
        speeds: relative speed of each rank, at least 0; None: all are equally fast.
    """

    sequences: int
    micro_batch: int
    ranks: int
    speeds: tuple[float, ...] | None = None

    def __post_init__(self) -> None:
        """Check the arguments.

        Raises:
            ValueError: there is no rank, the batch is not in whole microbatches, or the speeds are unusable.
        """
        if self.ranks < 1 or self.micro_batch < 1 or self.sequences < 0 or self.sequences % self.micro_batch:
            raise ValueError(
                f"{counted(self.sequences, 'sequence')} in microbatches of {self.micro_batch} for "
                f"{counted(self.ranks, 'rank')}"
            )
        if self.speeds is not None and len(self.speeds) != self.ranks:
            raise ValueError(f"{counted(len(self.speeds), 'speed')} for {counted(self.ranks, 'rank')}")
        if self.speeds is not None and not (
            all(0 <= speed < math.inf for speed in self.speeds) and any(self.speeds)
        ):
            raise ValueError(f"speeds must be finite, at least 0, and not all 0: {self.speeds}")

    @cached_property
    def sizes(self) -> tuple[int, ...]:
        """How many sequences each rank computes."""
        if self.speeds is not None and len(set(self.speeds)) > 1:
            return _by_speed(self.sequences, self.speeds)
        most, microbatches = -(-self.sequences // self.ranks), self.sequences // self.micro_batch
        whole, edge = divmod(most, self.micro_batch)
        if not edge:
            each, more = divmod(microbatches, self.ranks)
            return tuple((each + (rank < more)) * self.micro_batch for rank in range(self.ranks))
        left = microbatches - whole * self.ranks
        return tuple(whole * self.micro_batch + part for part in _edges(left, self.micro_batch, self.ranks, edge))

    @cached_property
    def _shares(self) -> tuple[tuple[Piece, ...], ...]:
        """Every rank's share: whole microbatches dealt out in rounds, then the rest cut into consecutive edges."""
        shares: list[list[Piece]] = [[] for _ in range(self.ranks)]
        wholes = [size // self.micro_batch for size in self.sizes]
        numbers = itertools.count()
        for dealt in range(max(wholes)):
            for rank, whole in enumerate(wholes):
                if dealt < whole:
                    shares[rank].append(Piece(next(numbers), 0, self.micro_batch))
        at = sum(wholes) * self.micro_batch
        for rank, size in enumerate(self.sizes):
            end = at + size % self.micro_batch
            while at < end:
                number, first = divmod(at, self.micro_batch)
                last = min(self.micro_batch, first + end - at)
                shares[rank].append(Piece(number, first, last))
                at += last - first
        return tuple(map(tuple, shares))

    def of(self, rank: int) -> tuple[Piece, ...]:
        """Return what `rank` computes, in this order; nothing where there is too little for all.

        Raises:
            ValueError: there is no such rank.
        """
        if not 0 <= rank < self.ranks:
            raise ValueError(f"rank {rank} is not in a world of {self.ranks}")
        return self._shares[rank]


@lru_cache(maxsize=8)
def shares(sequences: int, micro_batch: int, ranks: int, speeds: tuple[float, ...] | None = None) -> Shares:
    """Return a division; the last ones are kept, because a phase divides step after step alike."""
    return Shares(sequences, micro_batch, ranks, speeds)


def share_of(
    here: Position, rank: int, world_size: int, speeds: tuple[float, ...] | None = None
) -> tuple[Piece, ...]:
    """Return what rank `rank` of `world_size` computes of a step.

    The ranks of a context group (`phases[].context_parallel`, consecutive ranks) have the same share: the group is
    the data-parallel rank, as fast as the slowest of its ranks. `speeds` are those of all ranks.

    Raises:
        ValueError: the groups do not divide the ranks, or see `Shares`.
    """
    together = here.phase.context_parallel
    if world_size % together:
        raise ValueError(f"context_parallel {together} does not divide {counted(world_size, 'rank')}")
    if speeds is not None and together > 1:
        speeds = tuple(min(speeds[first : first + together]) for first in range(0, world_size, together))
    divided = shares(here.global_batch, here.phase.micro_batch, world_size // together, speeds)
    return divided.of(rank // together)


def _edges(left: int, micro_batch: int, ranks: int, most: int) -> list[int]:
    """Return how many sequences of `left` microbatches each rank gets, at most `most`, fewer than a microbatch.

    Each microbatch has its own ranks where there are enough of them, so that no rank's part is of two.
    """
    if ranks < left * -(-micro_batch // most):
        each, more = divmod(left * micro_batch, ranks)
        return [each + (rank < more) for rank in range(ranks)]
    edges: list[int] = []
    for microbatch in range(left):
        sharing = ranks // left + (microbatch < ranks % left)
        each, more = divmod(micro_batch, sharing)
        edges += [each + (part < more) for part in range(sharing)]
    return edges


def _by_speed(sequences: int, speeds: tuple[float, ...]) -> tuple[int, ...]:
    """Return the sizes, of this sum, whose largest size / speed is as small as can be; 0 for a speed of 0.

    Every size is at least its proportional part rounded down; what is left goes, one by one, to the rank that
    would be done with it first. Fractions hold floats exactly.
    """
    exact = [Fraction(speed) for speed in speeds]
    total = sum(exact)
    sizes = [math.floor(sequences * speed / total) for speed in exact]
    queue = [
        ((size + 1) / speed, rank) for rank, (size, speed) in enumerate(zip(sizes, exact, strict=True)) if speed
    ]
    heapq.heapify(queue)
    for _ in range(sequences - sum(sizes)):
        _, rank = queue[0]
        sizes[rank] += 1
        heapq.heapreplace(queue, ((sizes[rank] + 1) / exact[rank], rank))
    return tuple(sizes)
