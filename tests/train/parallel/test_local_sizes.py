"""Nodes with unlike numbers of ranks, as torchrun may start them: all ranks check a run by the same number."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from tests.train.ranks import in_group
from zslurm.train.config import PhaseConfig
from zslurm.train.errors import ConfigError
from zslurm.train.parallel.world import World, common_local_size
from zslurm.train.schedule import check_ranks

PAIRS = PhaseConfig(tokens=640, context=16, global_batch=8, micro_batch=1, lr=1e-2, context_parallel=2)


def refusal(group: dist.ProcessGroup, local_sizes: list[int]) -> tuple[int, str]:
    """What this rank takes for the size of a node, and why it refuses ranks that share sequences in pairs."""
    rank, size = group.rank(), group.size()
    world = World(rank, size, local_sizes[rank], torch.device("cpu"), group, dist.HashStore())
    local = common_local_size(world)
    try:
        check_ranks([PAIRS], size, local)
    except ConfigError as error:
        return local, str(error)
    return local, ""


@pytest.mark.parametrize(
    ("local_sizes", "local", "words"),
    [
        ([2, 2, 1, 1], 1, "phases[0].context_parallel (2) exceeds the 1 rank of a node"),
        ([4, 4, 4, 4], 4, ""),
    ],
)
def test_all_ranks_agree_whether_context_groups_fit_into_nodes(
    local_sizes: list[int], local: int, words: str
) -> None:
    """Else those of the larger node would train, and wait for the others forever."""
    found = in_group(refusal, 4, local_sizes)
    assert len(set(found)) == 1
    assert found[0][0] == local
    assert found[0][1].startswith(words)


def test_a_group_that_fits_the_smallest_node_may_still_span_two() -> None:
    """With 2, 3 and 3 ranks the pair of ranks 4 and 5 would be on two nodes."""
    assert {local for local, _ in in_group(refusal, 8, [2, 2, 3, 3, 3, 3, 3, 3])} == {1}
