"""How the sequences of a step are divided among its data-parallel ranks.

The shares of B sequences in M = B / m microbatches on R ranks, at most C = ceil(B / R) a rank:

    whole    if whole microbatches get by with C sequences a rank, rank r computes r, r + R, r + 2R, ...
    split    else every rank computes floor(C / m) whole ones in that order, and what is left over is split:
             a rank gets some sequences of one of them, or (if there is no other way) of two neighbours

If R divides M it is always the first. 1,016 ranks of 1,024 with B = 4,096 and m = 4 are the second: one whole
microbatch each, and the 32 sequences of the last eight go to 32 ranks, which then have 5. In whole microbatches
eight ranks would have 8, and the step would take twice as long instead of 1.25 times.

Everything follows from the arguments: all ranks find the same division without asking each other. A step has the
same sequences in the same microbatches at any number of ranks; only which rank computes a sequence, and so the
order of sums, differs. Nothing here imports torch.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import NamedTuple

from zslurm.checkpoint_tools.quantities import counted
from zslurm.train.schedule import Position


class SharePiece(NamedTuple):
    """Sequences of one microbatch that a rank runs forward and backward at once: all of them, or some.

    Attributes:
        number: the microbatch's place in the step.
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
    """The division of `sequences`, in microbatches of `micro_batch`, among `ranks` data-parallel ranks."""

    sequences: int
    micro_batch: int
    ranks: int

    def __post_init__(self) -> None:
        """Check the arguments.

        Raises:
            ValueError: there is no rank, or the batch is not in whole microbatches.
        """
        if self.ranks < 1 or self.micro_batch < 1 or self.sequences < 0 or self.sequences % self.micro_batch:
            raise ValueError(
                f"{counted(self.sequences, 'sequence')} in microbatches of {self.micro_batch} for "
                f"{counted(self.ranks, 'rank')}"
            )

    @cached_property
    def sizes(self) -> tuple[int, ...]:
        """How many sequences each rank computes."""
        most, microbatches = -(-self.sequences // self.ranks), self.sequences // self.micro_batch
        full_shares, edge = divmod(most, self.micro_batch)
        if not edge:
            full_count, more = divmod(microbatches, self.ranks)
            return tuple((full_count + (rank < more)) * self.micro_batch for rank in range(self.ranks))
        remaining = microbatches - full_shares * self.ranks
        return tuple(
            full_shares * self.micro_batch + extra
            for extra in _edges(remaining, self.micro_batch, self.ranks, edge)
        )

    @cached_property
    def _shares(self) -> tuple[tuple[SharePiece, ...], ...]:
        """Every rank's share: whole microbatches dealt out in rounds, then the rest cut into consecutive edges."""
        shares: list[list[SharePiece]] = [[] for _ in range(self.ranks)]
        wholes = [size // self.micro_batch for size in self.sizes]
        numbers = itertools.count()
        for dealt in range(max(wholes)):
            for rank, full_share in enumerate(wholes):
                if dealt < full_share:
                    shares[rank].append(SharePiece(next(numbers), 0, self.micro_batch))
        at = sum(wholes) * self.micro_batch
        for rank, size in enumerate(self.sizes):
            end = at + size % self.micro_batch
            while at < end:
                number, first = divmod(at, self.micro_batch)
                last = min(self.micro_batch, first + end - at)
                shares[rank].append(SharePiece(number, first, last))
                at += last - first
        return tuple(map(tuple, shares))

    def of(self, rank: int) -> tuple[SharePiece, ...]:
        """Return what `rank` computes, in this order; nothing if there is too little for all.

        Raises:
            ValueError: there is no such rank.
        """
        if not 0 <= rank < self.ranks:
            raise ValueError(f"rank {rank} is not in a world of {self.ranks}")
        return self._shares[rank]


@lru_cache(maxsize=8)
def shares(sequences: int, micro_batch: int, ranks: int) -> Shares:
    """Return a division; the last ones are kept, because a phase divides step after step alike."""
    return Shares(sequences, micro_batch, ranks)


def share_of(here: Position, rank: int, world_size: int) -> tuple[SharePiece, ...]:
    """Return what rank `rank` of `world_size` computes of a step.

    The ranks of a context group (`phases[].context_parallel`, consecutive ranks) have the same share: the group is
    the data-parallel rank.

    Raises:
        ValueError: the groups do not divide the ranks, or see `Shares`.
    """
    together = here.phase.context_parallel
    if world_size % together:
        raise ValueError(f"context_parallel {together} does not divide {counted(world_size, 'rank')}")
    return shares(here.global_batch, here.phase.micro_batch, world_size // together).of(rank // together)


def _edges(left: int, micro_batch: int, ranks: int, most: int) -> list[int]:
    """Return how many sequences of `left` microbatches each rank gets, at most `most`, fewer than a microbatch.

    Each microbatch has its own ranks if there are enough of them, so that no rank's part is of two.
    """
    if ranks < left * -(-micro_batch // most):
        size, more = divmod(left * micro_batch, ranks)
        return [size + (rank < more) for rank in range(ranks)]
    edges: list[int] = []
    for microbatch in range(left):
        sharing = ranks // left + (microbatch < ranks % left)
        size, more = divmod(micro_batch, sharing)
        edges += [size + (part < more) for part in range(sharing)]
    return edges
