"""Reading a rank's microbatches from the bundles, in the order of the run, as they are stored.

    order     the locations of some 4,096 sequences at once, of 32 at first and twice as many each time: the step
              that is waited for, at the start and after a recovery in memory, is there 0.4 s earlier
    advice    the kernel is advised of the next read's sequences before this read's are copied, so that a cold disk
              works on all of them at once; and that reads are random (Bundle.scattered)
    read      one copy out of the mapped bundles, of at most 262,144 tokens, or of one microbatch if that
              is more; microbatches and pieces of them (train/data/shares.py) are read together

If the page cache has nothing, advice makes reading tens of times as fast as the kernel's defaults do, at
contexts from 256 to 32,768 (benchmarks/data/data_loader.py, on a virtual disk with 8 MiB of read-ahead). Pages are
not given back after use (MADV_DONTNEED, POSIX_FADV_DONTNEED): the ranks of a node and the next epoch share the
page cache, and the kernel takes unused pages back by itself.

What it does not do: advise of the masks of fine-tuning data, which are small. Nothing here imports torch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from zslurm.train.data.order import DataOrder
from zslurm.train.data.sequences import PackedSequences, Sequences
from zslurm.train.data.shares import SharePiece, share_of
from zslurm.train.schedule import Position

FIRST_SEQUENCES, ORDERED_SEQUENCES = 32, 4096
READ_TOKENS = 1 << 18

_Share = Callable[[Position], tuple[SharePiece, ...]]


class MicrobatchPosition(NamedTuple):
    """A microbatch: its optimizer step, from 0, and its number among the step's microbatches."""

    step: int
    number: int


class PackedInputs(NamedTuple):
    """What is in the inputs of a microbatch of packs.

    Attributes:
        bounds_N: the start of documents, and of the padding of each sequence, among all its inputs, and their
        number,
            int32.
        filled_B: inputs of each sequence that are no padding, int64.
    """

    bounds_N: NDArray[np.int32]
    filled_B: NDArray[np.int64]


class Read(NamedTuple):
    """Microbatches, or pieces of them, of one context; N sequences in all.

    Attributes:
        locations: of which microbatches.
        sizes: how many sequences of each.
        windows_NS: their sequences, one after another, uint16 or uint32, S + 1 tokens each.
        mask_NS: uint8, 0 for each of the S targets that does not count; None if all do.
        packed: of packs, the documents and the padding of each microbatch; None for windows.
    """

    locations: list[MicrobatchPosition]
    sizes: list[int]
    windows_NS: NDArray[np.unsignedinteger]
    mask_NS: NDArray[np.uint8] | None
    packed: list[PackedInputs] | None = None


class _Planned(NamedTuple):
    """What is read at once; of one phase."""

    locations: list[MicrobatchPosition]
    sizes: list[int]
    sequences: Sequences


def read_from(order: DataOrder, step: int, rank: int, world_size: int) -> Iterator[Read]:
    """Yield the microbatches of one rank, from a step to the end of the run.

    Raises:
        DataError: a bundle is damaged.
    """
    planned = _planned(order, step, partial(share_of, rank=rank, world_size=world_size))
    following = next(planned, None)
    if following is not None:
        following.sequences.will_need()
    while following is not None:
        now, following = following, next(planned, None)
        if following is not None:
            following.sequences.will_need()
        windows_NS, mask_NS = order.data.read(now.sequences), order.data.target_mask(now.sequences)
        yield Read(now.locations, now.sizes, windows_NS, mask_NS, _packed_inputs(now))


def _packed_inputs(planned: _Planned) -> list[PackedInputs] | None:
    """Return the bounds of documents and padding in each microbatch of a read; None for windows."""
    sequences, inputs, first = planned.sequences, [], 0
    if not isinstance(sequences, PackedSequences):
        return None
    for size in planned.sizes:
        packs = sequences.part(first, first + size)
        inputs.append(PackedInputs(packs.bounds(), np.minimum(packs.filled, packs.context)))
        first += size
    return inputs


def _planned(order: DataOrder, step: int, share: _Share) -> Iterator[_Planned]:
    """Yield microbatches that are read together, and the places of their sequences."""
    for phase_index, pieces, numbers in _batches(order, step, share):
        context = order.plan.phases[phase_index].context
        packed = order.packed[phase_index]
        sequences = order.data.locate(*order.at(phase_index, numbers), context, packed=packed)
        first = 0
        for together in _together(pieces, READ_TOKENS // context):
            sizes = [piece.sequences for _, piece in together]
            locations = [MicrobatchPosition(step, piece.number) for step, piece in together]
            yield _Planned(locations, sizes, sequences.part(first, first + sum(sizes)))
            first += sum(sizes)


def _together(pieces: list[tuple[int, SharePiece]], most: int) -> Iterator[list[tuple[int, SharePiece]]]:
    """Yield the pieces, neighbours together up to `most` sequences, and at least one at a time."""
    together: list[tuple[int, SharePiece]] = []
    sequences = 0
    for step_and_piece in pieces:
        size = step_and_piece[1].sequences
        if together and sequences + size > most:
            yield together
            together, sequences = [], 0
        together.append(step_and_piece)
        sequences += size
    if together:
        yield together


def _batches(
    order: DataOrder, step: int, share: _Share
) -> Iterator[tuple[int, list[tuple[int, SharePiece]], NDArray[np.int64]]]:
    """Yield steps that are ordered at once: phase, steps and pieces, their sequences' numbers in the phase."""
    pieces: list[tuple[int, SharePiece]] = []
    numbers: list[NDArray[np.int64]] = []
    phase_index, ordered, most = 0, 0, FIRST_SEQUENCES
    for step_index in range(step, order.plan.total_steps):
        position = order.plan.at(step_index)
        if pieces and (position.phase_index != phase_index or ordered >= most):
            yield phase_index, pieces, np.concatenate(numbers)
            pieces, numbers, ordered, most = [], [], 0, min(2 * most, ORDERED_SEQUENCES)
        phase_index = position.phase_index
        for piece in share(position):
            start = position.sequence + piece.number * position.phase.micro_batch
            pieces.append((step_index, piece))
            numbers.append(np.arange(start + piece.first, start + piece.last))
            ordered += piece.sequences
    if pieces:
        yield phase_index, pieces, np.concatenate(numbers)
