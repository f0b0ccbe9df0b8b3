"""What a rank knows of checked steps and of checkpoints after it took the place of a lost one."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist

from tests.train.ranks import in_group
from zslurm.train.integrity.checks import Integrity
from zslurm.train.parallel.comm import Comm


def _kept_after_rank_0_was_replaced(group: dist.ProcessGroup) -> tuple[int, list[int]]:
    comm: Any = Comm(group)
    config: Any = SimpleNamespace(integrity=SimpleNamespace(every_steps=50))
    world: Any = SimpleNamespace(device=torch.device("cpu"))
    shards: Any = SimpleNamespace(comm=comm)
    nothing: Any = None
    integrity = Integrity(config, world, shards, nothing, nothing, local=1)
    if comm.rank == 1:  # it was there when step 3 was checked
        integrity.verified = 3
    integrity.start_over(6)
    return integrity.verified, sorted(integrity.to_keep(lambda: [5, 4, 2] if comm.rank == 0 else []))


def test_a_new_rank_0_keeps_the_checkpoint_that_others_know_to_be_right() -> None:
    assert in_group(_kept_after_rank_0_was_replaced, 2)[0] == (3, [2])


def _verified_after_a_start(group: dist.ProcessGroup) -> int:
    config: Any = SimpleNamespace(integrity=SimpleNamespace(every_steps=50))
    world: Any = SimpleNamespace(device=torch.device("cpu"))
    shards: Any = SimpleNamespace(comm=Comm(group))
    nothing: Any = None
    integrity = Integrity(config, world, shards, nothing, nothing, local=1)
    integrity.start_over(6)
    return integrity.verified


def test_a_start_takes_what_it_resumed_from_for_right() -> None:
    assert in_group(_verified_after_a_start, 2) == [6, 6]
