"""Reading a rank's microbatches from the bundles, in the order of the run, as they are stored.

    order     the locations of some 4,096 sequences at once: to shuffle a few costs as much as many
    advice    the kernel is advised of the next read's sequences before this read's are copied, so that a cold disk
              works on all of them at once; and that reads are random (Bundle.scattered)
    read      one copy out of the mapped bundles, of some 262,144 tokens or of one microbatch where that is more

Where the page cache has nothing, advice makes reading tens of times as fast as the kernel's defaults do, at
contexts from 256 to 32,768 (benchmarks/data/data_loader.py, on a virtual disk with 8 MiB of read-ahead). Pages are
not given back after use (MADV_DONTNEED, POSIX_FADV_DONTNEED): the ranks of a node and the next epoch share the
page cache, and the kernel takes unused pages back by itself.

What it does not do: advise of the masks of fine-tuning data, which are small. Nothing here imports torch.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from zslurm.train.data.order import DataOrder
from zslurm.train.data.sampler import microbatch_counters, rank_microbatches
from zslurm.train.data.training_data import Sequences

ORDERED_SEQUENCES = 4096
READ_TOKENS = 1 << 18


class Location(NamedTuple):
    """A microbatch: its optimizer step, from 0, and its number among the step's microbatches."""

    step: int
    number: int


class Read(NamedTuple):
    """M microbatches of one shape.

    Attributes:
        locations: which they are.
        windows_MBS: their sequences, uint16 or uint32, S + 1 tokens each.
        mask_MBS: uint8, 0 for each of the S targets that does not count; None where all do.
    """

    locations: list[Location]
    windows_MBS: NDArray[np.unsignedinteger]
    mask_MBS: NDArray[np.uint8] | None


def read_from(order: DataOrder, step: int, rank: int, world_size: int) -> Iterator[Read]:
    """Yield the microbatches of one rank, from a step to the end of the run.

    Raises:
        DataError: a bundle is damaged.
    """
    planned = _planned(order, step, rank, world_size)
    following = next(planned, None)
    if following is not None:
        order.data.will_need(following[1])
    while following is not None:
        (locations, sequences), following = following, next(planned, None)
        if following is not None:
            order.data.will_need(following[1])
        windows, mask = order.data.read(sequences), order.data.target_mask(sequences)
        shape = (len(locations), len(sequences) // len(locations), -1)
        yield Read(locations, windows.reshape(shape), None if mask is None else mask.reshape(shape))


def _planned(
    order: DataOrder, step: int, rank: int, world_size: int
) -> Iterator[tuple[list[Location], Sequences]]:
    """Yield microbatches that are read together, and where their sequences are."""
    for phase_index, locations, numbers in _batches(order, step, rank, world_size):
        phase = order.plan.phases[phase_index]
        sequences = order.data.locate(*order.at(phase_index, numbers), phase.context)
        together = max(1, READ_TOKENS // (phase.micro_batch * phase.context))
        for first in range(0, len(locations), together):
            last = min(first + together, len(locations))
            yield locations[first:last], sequences.part(first * phase.micro_batch, last * phase.micro_batch)


def _batches(
    order: DataOrder, step: int, rank: int, world_size: int
) -> Iterator[tuple[int, list[Location], NDArray[np.int64]]]:
    """Yield steps that are ordered at once: phase, microbatches, their sequences' numbers in the phase."""
    locations: list[Location] = []
    numbers: list[NDArray[np.int64]] = []
    phase_index = 0
    for each in range(step, order.plan.total_steps):
        here = order.plan.at(each)
        size = here.phase.micro_batch
        if locations and (here.phase_index != phase_index or len(locations) * size >= ORDERED_SEQUENCES):
            yield phase_index, locations, np.concatenate(numbers)
            locations, numbers = [], []
        phase_index = here.phase_index
        mine = rank_microbatches(here.microbatches, rank, world_size)
        locations += [Location(each, number) for number in mine]
        numbers.append(microbatch_counters(here.sequence, mine, size).ravel())
    if locations:
        yield phase_index, locations, np.concatenate(numbers)
