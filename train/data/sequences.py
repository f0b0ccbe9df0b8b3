"""Sequences that were found in the sources and are still to be read: windows of the stream, or packs of documents.

Windows are one piece each, context + 1 tokens long. Packs are the pieces of `train/data/packs`, side by side, then
padding. Both know the bundles of their documents, so that many are found at once and then advised and read.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from zslurm.train.data.bundle import Bundle
from zslurm.train.data.packs.packs import ranges


@dataclass(frozen=True, eq=False)
class Windows:
    """Windows of one context, and the start of each.

    Attributes:
        context: tokens in one sequence.
        source: int64 [k], places in the names of the data.
        index: int64 [k], of the sequence in its source.
        bundles: the bundle that each begins in.
        starts: the token of it.
    """

    context: int
    source: NDArray[np.int64]
    index: NDArray[np.int64]
    bundles: list[Bundle]
    starts: list[int]

    def __len__(self) -> int:
        return len(self.starts)

    def part(self, first: int, last: int) -> Windows:
        """Sequences [first, last) of these."""
        selection = slice(first, last)
        return Windows(
            self.context,
            self.source[selection],
            self.index[selection],
            self.bundles[selection],
            self.starts[selection],
        )

    def will_need(self) -> None:
        """Have the kernel fetch them while this process continues; what is in a second bundle is left out."""
        for bundle, start in zip(self.bundles, self.starts, strict=True):
            bundle.will_need(start, self.context + 1)


@dataclass(frozen=True, eq=False)
class PackedSequences:
    """Packs of one context, and the places of their pieces.

    Attributes:
        context: tokens in one sequence.
        sizes: pieces of each sequence, int64 [k].
        bundles: the bundle that each piece is in, sequence after sequence.
        starts: the first token of it.
        tokens: how many tokens it has, int64 [pieces].
    """

    context: int
    sizes: NDArray[np.int64]
    bundles: list[Bundle]
    starts: list[int]
    tokens: NDArray[np.int64]

    def __len__(self) -> int:
        return len(self.sizes)

    def part(self, first: int, last: int) -> PackedSequences:
        """Sequences [first, last) of these."""
        sizes, before = self.sizes[first:last], int(self._edges[first])
        selection = slice(before, before + int(sizes.sum()))
        return PackedSequences(
            self.context, sizes, self.bundles[selection], self.starts[selection], self.tokens[selection]
        )

    def will_need(self) -> None:
        """Have the kernel fetch them while this process continues."""
        for bundle, start, count in zip(self.bundles, self.starts, self.tokens.tolist(), strict=True):
            bundle.will_need(start, count)

    @cached_property
    def _edges(self) -> NDArray[np.int64]:
        """The start of the pieces of each sequence, int64 [k + 1]."""
        return np.append(0, np.cumsum(self.sizes))

    @cached_property
    def places(self) -> NDArray[np.int64]:
        """The start of each piece in its sequence, int64 [pieces]."""
        ends = np.cumsum(self.tokens)
        before = np.append(0, ends)[self._edges[:-1]]
        return ends - self.tokens - np.repeat(before, self.sizes)

    @cached_property
    def rows(self) -> NDArray[np.int64]:
        """The sequence of each piece, int64 [pieces]."""
        return np.repeat(np.arange(len(self)), self.sizes)

    @cached_property
    def filled(self) -> NDArray[np.int64]:
        """Tokens in each sequence, at most context + 1, int64 [k]."""
        return np.bincount(self.rows, weights=self.tokens, minlength=len(self)).astype(np.int64)

    def read(self, dtype: np.dtype[np.unsignedinteger], padding: int) -> NDArray[np.unsignedinteger]:
        """Return the tokens as they are stored, [k, context + 1], and `padding` behind the last.

        Raises:
            DataError: a token id is beyond the vocabulary.
        """
        rows = np.full((len(self), self.context + 1), padding, dtype)
        for row, offset, bundle, start, count in self._pieces():
            rows[row, offset : offset + count] = bundle.scattered[start : start + count]
        if len(self) and rows.max() >= self.bundles[0].header.vocab_size:
            for _, _, bundle, start, count in self._pieces():
                bundle.read(start, count)  # raises, and names the token
        return rows

    def target_mask(self) -> NDArray[np.uint8]:
        """Return which targets count, uint8 [k, context] of 0 and 1.

        Those do not that are the first token of a document or padding, nor those that a bundle's mask leaves out.
        """
        mask = np.ones((len(self), self.context + 1), np.uint8)  # of tokens; the first of a row is no target
        mask[self.rows, self.places] = 0
        mask[np.arange(self.context + 1) >= self.filled[:, None]] = 0
        for row, offset, bundle, start, count in self._pieces():
            if bundle.masked:
                mask[row, offset + 1 : offset + count] = bundle.read_targets(start + 1, count - 1)
        return mask[:, 1:]

    def bounds(self) -> NDArray[np.int32]:
        """Return the start of documents, and of the padding of each sequence, among all inputs, and their number.

        int32 [documents + 1]; inputs are `context` tokens of each sequence.
        """
        first = np.arange(len(self)) * self.context
        padded = self.filled < self.context
        starts = np.concatenate([first[self.rows] + self.places, (first + self.filled)[padded]])
        return np.append(np.sort(starts), len(self) * self.context).astype(np.int32)

    def _pieces(self) -> zip[tuple[int, int, Bundle, int, int]]:
        """Row, place in it, bundle, first token and number of tokens of each piece."""
        numbers = (self.rows.tolist(), self.places.tolist())
        return zip(*numbers, self.bundles, self.starts, self.tokens.tolist(), strict=True)


Sequences = Windows | PackedSequences


def joined(
    context: int,
    parts: list[tuple[NDArray[np.bool_], NDArray[np.int64], NDArray[np.int64], list[Bundle], list[int]]],
) -> PackedSequences:
    """Put packs of several sources into their order.

    Each part is of one source: which of the sequences are its, [k], the pieces of each of these, the tokens of
    each piece, and the bundles and starts of the pieces.
    """
    sizes = np.zeros(len(parts[0][0]), np.int64)
    for rows, of_mine, *_ in parts:
        sizes[rows] = of_mine
    edges = np.cumsum(sizes) - sizes
    tokens = np.empty(int(sizes.sum()), np.int64)
    order = np.empty_like(tokens)  # of the pieces, in the order of the parts
    bundles: list[Bundle] = []
    starts: list[int] = []
    for rows, of_mine, of_pieces, in_bundles, begins in parts:
        places = ranges(edges[rows], of_mine)
        tokens[places] = of_pieces
        order[places] = len(starts) + np.arange(len(begins))
        bundles += in_bundles
        starts += begins
    chosen = order.tolist()
    return PackedSequences(context, sizes, [bundles[i] for i in chosen], [starts[i] for i in chosen], tokens)
