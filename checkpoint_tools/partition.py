"""Who owns which elements: a pure function of (tensor table, world size).

All tensors lie end to end in one flat space, in table order, each starting at a multiple of ALIGN elements;
the end is padded to a multiple of world_size * ALIGN, and rank r owns the r-th of world_size equal chunks.
What a rank owns of a tensor is an extent [start, stop) of the tensor's row-major elements ("parameter
space"), which means the same at every world size: resuming on another number of ranks is an intersection of
intervals.

    tensors   |embed------------|norm-.|expert--------------.|...pad|
    ranks     |0---------|1---------|2---------|3---------|

Cost: fewer than ALIGN elements of padding per tensor, and fewer than world_size * ALIGN at the end;
`extents` is a binary search plus its answer, so 4,000 tensors on 1,024 ranks are 5,023 extents at most, not
their product. ALIGN = 32 puts every tensor and chunk on 64 bytes in bf16 and 128 bytes in fp32.

It does not know dtypes, states or optimizers. Tensors that one rank must own whole (Muon matrices) come as
rows with an attribute of their own, and will change only what `partition` answers: everything else asks
`extents`.
"""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from typing import Protocol

from checkpoint_tools.errors import Mismatch

ALIGN = 32
"""Elements; every tensor and every chunk starts at a multiple of it."""


class TensorRow(Protocol):
    """What `partition` needs to know of a tensor."""

    @property
    def name(self) -> str: ...

    @property
    def shape(self) -> tuple[int, ...]: ...


@dataclass(frozen=True, slots=True)
class Placement:
    """Where a tensor lies in the flat space: elements [offset, offset + numel)."""

    name: str
    offset: int
    numel: int


@dataclass(frozen=True, slots=True)
class Extent:
    """Elements [start, stop) of a tensor, row-major, `offset_in_chunk` elements into their owner's chunk."""

    tensor: str
    start: int
    stop: int
    offset_in_chunk: int

    @property
    def numel(self) -> int:
        """Elements in the extent, never 0."""
        return self.stop - self.start

    @property
    def in_chunk(self) -> slice:
        """The slice of the owner's flat chunk that holds the extent."""
        return slice(self.offset_in_chunk, self.offset_in_chunk + self.numel)


@dataclass(frozen=True)
class Partition:
    """The flat layout of a tensor table over `world_size` ranks. Lengths and offsets are in elements."""

    world_size: int
    length: int
    placements: tuple[Placement, ...]

    @property
    def chunk(self) -> int:
        """Elements that each rank owns, padding included; a multiple of ALIGN."""
        return self.length // self.world_size

    @cached_property
    def _offsets(self) -> list[int]:
        return [placement.offset for placement in self.placements]

    def extents(self, rank: int) -> tuple[Extent, ...]:
        """What `rank` owns, in flat order; empty where its chunk is all padding.

        Raises:
            Mismatch: there is no such rank.
        """
        if not 0 <= rank < self.world_size:
            raise Mismatch(f"rank must be in [0, {self.world_size}), got {rank}")
        begin, end = rank * self.chunk, (rank + 1) * self.chunk
        found = []
        first = max(0, bisect_right(self._offsets, begin) - 1)
        for index in range(first, bisect_left(self._offsets, end)):
            placement = self.placements[index]
            start = max(begin, placement.offset) - placement.offset
            stop = min(end, placement.offset + placement.numel) - placement.offset
            if start < stop:
                found.append(Extent(placement.name, start, stop, placement.offset + start - begin))
        return tuple(found)


def partition(table: Iterable[TensorRow], world_size: int) -> Partition:
    """Lay `table` out over `world_size` ranks, in table order; the same input always gives the same layout.

    Raises:
        Mismatch: world_size is below 1, a name comes twice, or a dimension is negative.
    """
    if world_size < 1:
        raise Mismatch(f"world_size must be at least 1, got {world_size}")
    placements: list[Placement] = []
    names: set[str] = set()
    end = 0
    for row in table:
        if row.name in names:
            raise Mismatch(f"tensor {row.name!r} comes twice in the table; names must be unique")
        if any(size < 0 for size in row.shape):
            raise Mismatch(f"tensor {row.name!r} has a negative dimension in its shape {row.shape}")
        names.add(row.name)
        placements.append(Placement(row.name, _round_up(end, ALIGN), math.prod(row.shape)))
        end = placements[-1].offset + placements[-1].numel
    return Partition(world_size, _round_up(end, world_size * ALIGN), tuple(placements))


def _round_up(count: int, multiple: int) -> int:
    return -(-count // multiple) * multiple
