"""The groups of ranks that share sequences, one for each `context_parallel` of a run's phases.

c consecutive ranks share a sequence. They are ranks of one node (`train.schedule.check_ranks` refuses other
layouts), so that keys and values never leave it.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch.distributed as dist

from zslurm.train.config import ParallelConfig
from zslurm.train.context import ContextParallel
from zslurm.train.parallel.world import World


def context_groups(world: World, sizes: Iterable[int], config: ParallelConfig) -> dict[int, ContextParallel | None]:
    """Join this rank's group of each size; None for size 1, where every rank has its own sequences.

    All ranks call it together, with the same sizes, each of which divides the number of ranks.
    """
    return {size: _join(world, size, config) for size in sorted(set(sizes))}


def _join(world: World, size: int, config: ParallelConfig) -> ContextParallel | None:
    if size == 1:
        return None
    if size == world.size:
        return ContextParallel(world.group, world.rank, size, config.context_attention)
    first = world.rank - world.rank % size
    # Only the members take part: at 1,024 ranks, every rank would else wait for 128 groups to be made.
    group = dist.new_group(list(range(first, first + size)), use_local_synchronization=True)
    assert group is not None
    return ContextParallel(group, world.rank % size, size, config.context_attention)
