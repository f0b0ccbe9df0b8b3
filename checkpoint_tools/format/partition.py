"""Who owns which elements: a pure function of (tensor table, world size).

What a rank owns is its chunk, a buffer of two parts: a share of the flat space, and whole matrices.

    chunk of rank r      | share r of the flat space | m x n | m x n | m x n ... | p x q ... |

Rows of the table with `whole` = 0 are flat. They are end to end in one flat space, in table order, each starting
at a multiple of ALIGN elements; the end is padded to a multiple of world_size * ALIGN, and rank r owns the r-th of
world_size equal shares.

    flat tensors   |embed------------|norm-.|bias----.|...pad|
    shares         |0---------|1---------|2---------|3-------|

Rows with `whole` = K are K matrices of equal size, one after the other (K = 1: a weight [m, n]; K = E: the E
experts of [E, m, n]). Each matrix has one owner, for an optimizer that needs all of it: Newton-Schulz steps cost
about max(m, n) min(m, n)^2, and matrices are packed onto ranks by that cost, largest first, with the elements of
a rank capped so that memory is even too (packing.py). Ties go by name. A rank's matrices of one shape are adjacent
and equally strided, each at a multiple of ALIGN, so that [count, m, n] is a strided view of the chunk.

What a rank owns of a tensor is an extent [start, stop) of the tensor's row-major elements ("parameter space"),
which means the same at every world size: resuming on another number of ranks is an intersection of intervals.

Cost: fewer than ALIGN elements of padding per tensor or matrix, and fewer than world_size * ALIGN at the end of
the flat space; for ZAYA1-base (1,640 matrices) at 1,024 ranks some 25 ms, once, and then a binary search per rank.
ALIGN = 32 puts everything on 64 bytes in bf16 and 128 bytes in fp32.

It does not know dtypes, states or optimizers: what is owned whole is the table's word.
"""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import groupby
from typing import Protocol

from zslurm.checkpoint_tools.errors import Mismatch
from zslurm.checkpoint_tools.format.packing import Size, lower_bound, pack
from zslurm.checkpoint_tools.quantities import counted

ALIGN = 32
"""Elements; every flat tensor, share and matrix starts at a multiple of it."""

MAX_RANKS = 1 << 20
"""More ranks than this are refused: it is a typing error, and a layout of them would fill the memory."""


class TensorRow(Protocol):
    """What `partition` needs to know of a tensor."""

    @property
    def name(self) -> str:
        """Return the tensor's name."""

    @property
    def shape(self) -> tuple[int, ...]:
        """Return its dimensions."""

    @property
    def whole(self) -> int:
        """Matrices, one after the other, that one rank each must own whole; 0 for a flat tensor."""


@dataclass(frozen=True, slots=True)
class Placement:
    """The range of a flat tensor in the flat space: elements [offset, offset + numel)."""

    name: str
    offset: int
    numel: int


@dataclass(frozen=True, slots=True)
class Matrix:
    """The `index`-th whole matrix [rows, columns] of a tensor, `offset` elements into its owner's chunk."""

    tensor: str
    index: int
    rows: int
    columns: int
    offset: int

    @property
    def numel(self) -> int:
        """Return the elements of the matrix."""
        return self.rows * self.columns

    @property
    def cost(self) -> int:
        """Return what one Newton-Schulz step costs, in multiply-adds up to a constant: max(m, n) min(m, n)^2."""
        return self.numel * min(self.rows, self.columns)


@dataclass(frozen=True, slots=True)
class Batch:
    """Adjacent matrices of one shape: [count, rows, columns] from element `offset` of a chunk, `stride` apart."""

    rows: int
    columns: int
    count: int
    offset: int
    stride: int


@dataclass(frozen=True, slots=True)
class Extent:
    """Elements [start, stop) of a tensor, row-major, `offset_in_chunk` elements into their owner's chunk."""

    tensor: str
    start: int
    stop: int
    offset_in_chunk: int

    @property
    def numel(self) -> int:
        """Return the elements in the extent, never 0."""
        return self.stop - self.start

    @property
    def in_chunk(self) -> slice:
        """Return the slice of the owner's chunk that holds the extent."""
        return slice(self.offset_in_chunk, self.offset_in_chunk + self.numel)


@dataclass(frozen=True)
class Balance:
    """How even whole matrices are: the most that one rank has, and the least that this could be.

    `cost` is of Newton-Schulz steps (`Matrix.cost`), `elements` are of whole matrices. A bound is a
    load that some rank has however whole matrices are divided (packing.py); `mean` is what matrices that could be
    cut would give. `idle_ranks` own no matrix.
    """

    cost: int
    cost_bound: int
    cost_mean: float
    elements: int
    elements_bound: int
    elements_mean: float
    idle_ranks: int


@dataclass(frozen=True)
class Partition:
    """The layout of a tensor table over `world_size` ranks. Lengths and offsets are in elements.

    Attributes:
        flat_length: of the flat space, padding included.
        placements: the flat tensors.
        matrices: of each rank, in the order of its chunk.
    """

    world_size: int
    flat_length: int
    placements: tuple[Placement, ...]
    matrices: tuple[tuple[Matrix, ...], ...]

    @property
    def flat_share(self) -> int:
        """Return the elements of the flat space that each rank owns, padding included; a multiple of ALIGN."""
        return self.flat_length // self.world_size

    def chunk(self, rank: int) -> int:
        """Return the elements of all that `rank` owns, padding included; a multiple of ALIGN."""
        matrices = self.matrices[self._checked(rank)]
        return matrices[-1].offset + _round_up(matrices[-1].numel, ALIGN) if matrices else self.flat_share

    def batches(self, rank: int) -> tuple[Batch, ...]:
        """Return the matrices of `rank`, grouped by shape."""
        groups = groupby(self.matrices[self._checked(rank)], key=lambda matrix: (matrix.rows, matrix.columns))
        return tuple(_batch(list(matrices)) for _, matrices in groups)

    def extents(self, rank: int) -> tuple[Extent, ...]:
        """Return what `rank` owns, in the order of its chunk; empty if that is all padding.

        Raises:
            Mismatch: there is no such rank.
        """
        return (*self._flat_extents(self._checked(rank)), *map(_extent, self.matrices[rank]))

    def matrix_cost(self, rank: int) -> int:
        """Return what a Newton-Schulz step of all matrices of `rank` costs (see `Matrix.cost`)."""
        return sum(matrix.cost for matrix in self.matrices[self._checked(rank)])

    def matrix_elements(self, rank: int) -> int:
        """Return the elements of all matrices of `rank`."""
        return sum(matrix.numel for matrix in self.matrices[self._checked(rank)])

    def balance(self) -> Balance:
        """Return how even the whole matrices are."""
        every = [matrix for matrices in self.matrices for matrix in matrices]
        costs = [self.matrix_cost(rank) for rank in range(self.world_size)]
        elements = [self.matrix_elements(rank) for rank in range(self.world_size)]
        return Balance(
            cost=max(costs),
            cost_bound=lower_bound((matrix.cost for matrix in every), self.world_size),
            cost_mean=sum(costs) / self.world_size,
            elements=max(elements),
            elements_bound=lower_bound((matrix.numel for matrix in every), self.world_size),
            elements_mean=sum(elements) / self.world_size,
            idle_ranks=sum(not matrices for matrices in self.matrices),
        )

    def _checked(self, rank: int) -> int:
        if not 0 <= rank < self.world_size:
            raise Mismatch(f"rank must be in [0, {self.world_size}), got {rank}")
        return rank

    @cached_property
    def _offsets(self) -> list[int]:
        return [placement.offset for placement in self.placements]

    def _flat_extents(self, rank: int) -> Iterator[Extent]:
        begin, end = rank * self.flat_share, (rank + 1) * self.flat_share
        first = max(0, bisect_right(self._offsets, begin) - 1)
        for index in range(first, bisect_left(self._offsets, end)):
            placement = self.placements[index]
            start = max(begin, placement.offset) - placement.offset
            stop = min(end, placement.offset + placement.numel) - placement.offset
            if start < stop:
                yield Extent(placement.name, start, stop, placement.offset + start - begin)


def partition(table: Iterable[TensorRow], world_size: int) -> Partition:
    """Lay `table` out over `world_size` ranks; the same input always gives the same layout.

    Flat tensors keep the order of the table; who owns a matrix does not depend on that order.

    Raises:
        Mismatch: world_size is not in [1, MAX_RANKS], a name comes twice, a dimension is negative, or a tensor
            cannot be cut into as many matrices as its row asks for.
    """
    if not 1 <= world_size <= MAX_RANKS:
        raise Mismatch(f"the number of ranks must be between 1 and {MAX_RANKS}, got {world_size}")
    rows = tuple(table)
    _check(rows)
    placements: list[Placement] = []
    end = 0
    for row in rows:
        if not row.whole:
            placements.append(Placement(row.name, _round_up(end, ALIGN), math.prod(row.shape)))
            end = placements[-1].offset + placements[-1].numel
    length = _round_up(end, world_size * ALIGN)
    matrices = [matrix for row in rows for matrix in _matrices(row)]
    return Partition(world_size, length, tuple(placements), _owners(matrices, world_size, length // world_size))


def _check(rows: Iterable[TensorRow]) -> None:
    names: set[str] = set()
    for row in rows:
        if row.name in names:
            raise Mismatch(f"tensor {row.name!r} comes twice in the table; names must be unique")
        if any(size < 0 for size in row.shape):
            raise Mismatch(f"tensor {row.name!r} has a negative dimension in its shape {row.shape}")
        if row.whole and (row.whole < 0 or len(row.shape) < 2 or math.prod(row.shape[:-1]) % row.whole):
            raise Mismatch(
                f"tensor {row.name!r} of shape {row.shape} cannot be cut into "
                f"{counted(row.whole, 'matrix', 'matrices')}"
            )
        names.add(row.name)


def _matrices(row: TensorRow) -> Iterator[Matrix]:
    """Yield the whole matrices of a tensor, not placed yet; one without elements needs no owner."""
    if row.whole and math.prod(row.shape):
        rows = math.prod(row.shape[:-1]) // row.whole
        for index in range(row.whole):
            yield Matrix(row.name, index, rows, row.shape[-1], offset=0)


def _owners(matrices: list[Matrix], world_size: int, share: int) -> tuple[tuple[Matrix, ...], ...]:
    """Return the matrices of each rank, at their offsets: behind its share, the costliest shape first."""
    # One order of all matrices serves both: the packing wants cost, a chunk wants shapes together.
    matrices = sorted(matrices, key=lambda m: (-m.cost, -m.numel, m.rows, m.tensor, m.index))
    owned: list[list[Matrix]] = [[] for _ in range(world_size)]
    ends = [share] * world_size
    for matrix, rank in zip(matrices, pack([Size(m.cost, m.numel) for m in matrices], world_size), strict=True):
        owned[rank].append(Matrix(matrix.tensor, matrix.index, matrix.rows, matrix.columns, ends[rank]))
        ends[rank] += _round_up(matrix.numel, ALIGN)
    return tuple(map(tuple, owned))


def _batch(matrices: Sequence[Matrix]) -> Batch:
    first = matrices[0]
    return Batch(first.rows, first.columns, len(matrices), first.offset, _round_up(first.numel, ALIGN))


def _extent(matrix: Matrix) -> Extent:
    start = matrix.index * matrix.numel
    return Extent(matrix.tensor, start, start + matrix.numel, matrix.offset)


def _round_up(count: int, multiple: int) -> int:
    return -(-count // multiple) * multiple
