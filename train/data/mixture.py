"""Mixing sources in exact shares: which source a sequence of a phase comes from, as a pure function of its place.

The sequences of a phase are numbered 0, 1, 2, ... and cut into blocks of B. With integer weights v_1 ... v_k of
sum V, the sources' counts among the first n sequences are, at every border of a block (B divides n),

    C_i(n) = floor(n (v_1 + ... + v_i) / V) - floor(n (v_1 + ... + v_(i-1)) / V)

They add up to n, and each is within one of its share n v_i / V, however long the phase is: nothing is drawn at
random that could drift. Inside a block C_i(n + B) - C_i(n) slots go to source i, and which ones is a permutation
keyed by (seed, phase, block) (train/data/sampler.py). A block's j-th slot of source i takes sequence C_i(n) + j of
that source's own order, so what a phase has taken of a source is always its next ones, without gap.

B is the smallest power of two of at least 64 in which the smallest share has a slot: then C_i never falls, because
it is n v_i / V rounded down or up. Finding any place takes O(B), a few microseconds in most mixtures; no list of
the sequences exists anywhere. Integers are Python's, so that nothing is rounded on the way.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from fractions import Fraction
from itertools import accumulate, pairwise
from math import lcm

import numpy as np
from numpy.typing import NDArray

from zslurm.train.data.sampler import permute, round_keys

SMALLEST_BLOCK = 64
LARGEST_BLOCK = 1 << 20
"""A share of less than one in this many sequences is refused: a block would be slow to look into."""


@dataclass(frozen=True)
class Mixture:
    """The mixture of one phase.

    Attributes:
        names: sources with a share, sorted: the order in which a run file lists them changes nothing.
        weights: a positive integer for each.
        purpose: names the seed and the phase; it keys the permutations.
    """

    names: tuple[str, ...]
    weights: tuple[int, ...]
    purpose: str

    @classmethod
    def of(cls, shares: Mapping[str, float], purpose: str) -> Mixture:
        """Return a mixture by shares to any scale; one of 0 leaves its source out.

        A share counts as the decimal that it is written as: 0.1 is a tenth, not the binary fraction next to it.

        Raises:
            ValueError: no share is above 0, or one is too small; names the source.
        """
        exact = {name: Fraction(str(share)) for name, share in sorted(shares.items()) if share > 0}
        if not exact:
            raise ValueError("no source has a share above 0")
        scale = lcm(*(share.denominator for share in exact.values()))
        weights = {name: int(share * scale) for name, share in exact.items()}
        least = min(weights, key=weights.__getitem__)
        if weights[least] * LARGEST_BLOCK < sum(weights.values()):
            raise ValueError(f"{least} has less than one sequence in {LARGEST_BLOCK:,}: give it 0 or more")
        return cls(tuple(weights), tuple(weights.values()), purpose)

    @property
    def block(self) -> int:
        """Sequences in a block."""
        needed = -(-sum(self.weights) // min(self.weights))
        return max(SMALLEST_BLOCK, 1 << (needed - 1).bit_length())

    def shares(self) -> dict[str, float]:
        """Share of each source, of 1."""
        return {name: weight / sum(self.weights) for name, weight in zip(self.names, self.weights, strict=True)}

    def counts(self, sequences: int) -> dict[str, int]:
        """Return how many of the first `sequences` sequences come from each source."""
        block, inside = divmod(sequences, self.block)
        counts = self._counts_at(block)
        if inside:
            source, _ = self._slots(np.array([block]))
            counts = counts + np.bincount(source[0, :inside], minlength=len(self.names))
        return dict(zip(self.names, counts.tolist(), strict=True))

    def at(self, sequences: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Return the source of sequences of the phase, int64 [k], each at least 0, in any order.

        Returns:
            The source's place in `names`, int64 [k], and its sequences that the phase takes before this one,
            int64 [k].
        """
        if len(self.names) == 1:
            return np.zeros_like(sequences), sequences
        blocks, inside = np.divmod(sequences, self.block)
        unique_blocks, which = np.unique(blocks, return_inverse=True)
        source, before = self._slots(unique_blocks)
        return source[which, inside], before[which, inside]

    def _counts_at(self, block: int) -> NDArray[np.int64]:
        """C_i at the beginning of a block, int64 [sources]."""
        sums = [0, *accumulate(self.weights)]
        edges = [block * self.block * reached // sums[-1] for reached in sums]
        return np.array([after - before for before, after in pairwise(edges)], dtype=np.int64)

    def _slots(self, blocks: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Return the source of every slot of some blocks, and what the phase takes of it before.

        Int64 [blocks, B].
        """
        first = np.stack([self._counts_at(block) for block in blocks.tolist()])
        ends = np.cumsum(np.stack([self._counts_at(block + 1) for block in blocks.tolist()]) - first, axis=1)
        keys = np.stack([round_keys(f"{self.purpose} {block}") for block in blocks.tolist()], axis=1)
        places = np.broadcast_to(np.arange(self.block), (len(blocks), self.block))
        drawn = permute(places, self.block, keys[:, :, None])
        source = np.zeros_like(drawn)
        for end in ends.T[:-1]:
            source += drawn >= end[:, None]
        # A slot's rank among its source's in the block is its rank in a stable sort by source, less the slots of
        # the sources before.
        rank = np.empty_like(drawn)
        np.put_along_axis(rank, np.argsort(source, axis=1, kind="stable"), places, axis=1)
        offset = first - (ends - np.diff(ends, axis=1, prepend=0))
        return source, rank + np.take_along_axis(offset, source, axis=1)
