"""The places of the gradients of matrices, in which portions they are reduced, and how they get to their owners.

Matrices are end to end in a separate space, last used first, which is the order in which backward finishes
their gradients. The space is cut into buckets of equal length, wherever that falls, and each bucket into one equal
chunk per rank, its *held* elements: what one reduce-scatter per bucket leaves on that rank.

    matrix space   |down.39 |gate_up.39       |...|query.0 |pad|
    buckets        |0            |1            |2            |     of parallel.bucket_mb
    held by rank   |0 |1 |2 |3   |0 |1 |2 |3   |0 |1 |2 |3   |

A matrix belongs to one rank as a whole (`checkpoint_tools.partition`), so what a rank holds is a row of pieces for
owners everywhere. A piece is what one rank holds of one matrix in one bucket. Both sides of an exchange know all
pieces only from the table: nothing is negotiated.

Cost: a rank holds a piece or a few per bucket, and owns one per rank that holds some of its matrices. ZAYA1-base
in buckets of 64 MiB has 495 buckets; a rank of 8 holds 700 pieces and owns 700, a rank of 1,024 holds 500 and owns
560, at most 1,320. Planning takes some milliseconds, once.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from zslurm.checkpoint_tools import ALIGN, Partition, Placement
from zslurm.train.shapes import TensorInfo


@dataclass(frozen=True, slots=True)
class Bucket:
    """Elements [start, stop) of the matrix space, and one rank's chunk of them in every bucket."""

    start: int
    stop: int
    chunk: int

    def held(self, rank: int) -> slice:
        """Return the elements of the space that `rank` holds."""
        return slice(self.start + rank * self.chunk, self.start + (rank + 1) * self.chunk)


@dataclass(frozen=True, slots=True)
class BucketPiece:
    """`numel` elements at `start` in the matrix space, and at `offset` in their owner's chunk of the partition.

    `in_share` is their offset in what their holder holds, all its chunks one after the other.
    """

    holder: int
    owner: int
    start: int
    in_share: int
    offset: int
    numel: int


@dataclass(frozen=True, slots=True)
class _Placed:
    """A matrix in the space."""

    start: int
    stop: int
    owner: int
    offset: int


class MatrixSpace:
    """The matrix space of a table, divided over the ranks of a partition.

    Attributes:
        ranks: how many there are.
        placements: the place of each tensor of matrices, last used first.
        length: elements of the space, padding included.
        bucket: elements of a bucket.
        buckets: all of them; the last one may be shorter.
    """

    def __init__(self, table: Iterable[TensorInfo], layout: Partition, bucket_elements: int) -> None:
        """Lay the matrices of `table` out; a bucket has about `bucket_elements`."""
        self._layout, self.ranks = layout, layout.world_size
        placements, end = [], 0
        for row in reversed(tuple(table)):
            if row.whole:
                placements.append(Placement(row.name, end, row.numel))
                end = _round_up(end + row.numel, ALIGN)
        self.placements = tuple(placements)
        step = self.ranks * ALIGN
        self.length = _round_up(end, step)
        self.bucket = max(step, min(bucket_elements // step * step, self.length))
        self.buckets = tuple(
            Bucket(start, stop, (stop - start) // self.ranks)
            for start in range(0, self.length, self.bucket)
            for stop in [min(start + self.bucket, self.length)]
        )
        self._matrices = self._placed()
        self._starts = [matrix.start for matrix in self._matrices]

    @property
    def share(self) -> int:
        """Return the elements that each rank holds, padding included."""
        return self.length // self.ranks

    def buckets_of(self, place: Placement) -> range:
        """Return the numbers of the buckets that a tensor has elements in."""
        return range(place.offset // self.bucket, -(-(place.offset + place.numel) // self.bucket))

    def held_by(self, rank: int) -> tuple[BucketPiece, ...]:
        """Return the pieces that `rank` holds, in the order in which they are sent: by owner, then by start."""
        pieces = (piece for bucket in self.buckets for piece in self._within(bucket, rank, bucket.held(rank)))
        return tuple(sorted(pieces, key=lambda piece: (piece.owner, piece.start)))

    def owned_by(self, rank: int) -> tuple[BucketPiece, ...]:
        """Return the pieces that `rank` owns, in the order in which they arrive: by holder, then by start."""
        pieces = (
            piece
            for matrix in self._matrices
            if matrix.owner == rank
            for holder, bucket, part in self._holders(matrix)
            for piece in self._within(bucket, holder, part)
        )
        return tuple(sorted(pieces, key=lambda piece: (piece.holder, piece.start)))

    def _placed(self) -> list[_Placed]:
        offsets = {place.name: place.offset for place in self.placements}
        placed = []
        for owner, matrices in enumerate(self._layout.matrices):
            for matrix in matrices:
                start = offsets[matrix.tensor] + matrix.index * matrix.numel
                placed.append(_Placed(start, start + matrix.numel, owner, matrix.offset))
        return sorted(placed, key=lambda matrix: matrix.start)

    def _within(self, bucket: Bucket, holder: int, part: slice) -> Iterator[BucketPiece]:
        """Yield the pieces of `part` of the space, all of which `holder` holds in `bucket`."""
        index = max(0, bisect_right(self._starts, part.start) - 1)
        while index < len(self._matrices) and self._matrices[index].start < part.stop:
            matrix = self._matrices[index]
            start, stop = max(part.start, matrix.start), min(part.stop, matrix.stop)
            if start < stop:
                in_share = bucket.start // self.ranks + start - bucket.held(holder).start
                offset = matrix.offset + start - matrix.start
                yield BucketPiece(holder, matrix.owner, start, in_share, offset, stop - start)
            index += 1

    def _holders(self, matrix: _Placed) -> Iterator[tuple[int, Bucket, slice]]:
        """Yield who holds what of a matrix."""
        for number in range(matrix.start // self.bucket, -(-matrix.stop // self.bucket)):
            bucket = self.buckets[number]
            first = max(0, matrix.start - bucket.start) // bucket.chunk
            last = math.ceil((min(matrix.stop, bucket.stop) - bucket.start) / bucket.chunk)
            for holder in range(first, last):
                held = bucket.held(holder)
                yield holder, bucket, slice(max(held.start, matrix.start), min(held.stop, matrix.stop))


def _round_up(count: int, multiple: int) -> int:
    return -(-count // multiple) * multiple
