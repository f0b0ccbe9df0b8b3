"""`parallel.recompute: auto` on ranks whose GPUs differ."""

from __future__ import annotations

from functools import partial
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from tests.train.ranks import in_group
from zslurm.train.assembly import recomputed_by_all
from zslurm.train.config import ModelConfig, TrainConfig
from zslurm.train.errors import ConfigError
from zslurm.train.parallel import world as world_module
from zslurm.train.parallel.world import World
from zslurm.train.plan.memory import plan_memory

PHASE = {"tokens": 10**9, "context": 4096, "global_batch": 64, "micro_batch": 8, "lr": 1e-3}


def config_of(recompute: Any) -> TrainConfig:
    parallel = {"dtype": "bf16", "recompute": recompute}
    return TrainConfig.model_validate({"model": ModelConfig(), "phases": [PHASE], "parallel": parallel})


def chosen(group: dist.ProcessGroup, memory: list[int], *, is_integrated: bool = False) -> list[int]:
    """Return what a rank chooses alone, with its GPU's memory, and among all."""
    rank = dist.get_rank(group)
    world = World(rank, 2, 2, torch.device("cuda", rank), group, dist.HashStore())
    found = []
    for known in ([memory[rank]] * 2, memory):
        properties = SimpleNamespace(total_memory=known[rank], is_integrated=is_integrated)
        with (
            mock.patch.object(torch.cuda, "get_device_properties", lambda _, given=properties: given),
            mock.patch.object(
                world_module, "to_device", lambda values, _: torch.tensor(values, dtype=torch.float64)
            ),
            mock.patch.object(dist, "all_reduce", _alone if known is not memory else dist.all_reduce),
        ):
            found.append(recomputed_by_all(config_of("auto"), world))
    return found


def _alone(*_: Any, **__: Any) -> None:
    """Leave the values as they are."""


def test_all_ranks_recompute_as_many_layers_as_the_smallest_gpu_asks_for() -> None:
    """Ranks that share sequences communicate in every layer that is recomputed: with unequal numbers they hang."""
    most, least = (plan_memory(config_of(value), 2, on_cpu=False, local=2).peak for value in (False, True))
    found = in_group(chosen, 2, [int(1.2 * most), int(0.6 * (most + least))])
    alone, together = ([each[way] for each in found] for way in (0, 1))
    assert alone[0] == 0 < alone[1]
    assert together == [alone[1]] * 2


def test_a_device_that_shares_the_host_s_memory_has_less_for_the_trainer() -> None:
    plan = plan_memory(config_of(False), 2, on_cpu=False, local=2)
    memory = [int(1.2 * plan.peak)] * 2
    own, shared = (in_group(partial(chosen, is_integrated=it), 2, memory) for it in (False, True))
    assert own[0][0] == 0
    assert plan.peak > 0.9 * (memory[0] - plan.staging)  # without the copy for a checkpoint it does not fit
    assert shared[0][0] > 0


def test_a_copy_that_takes_more_than_a_shared_memory_is_refused() -> None:
    properties = SimpleNamespace(total_memory=1 << 20, is_integrated=True)
    world = World(0, 2, 2, torch.device("cuda", 0), None, None)  # type: ignore[arg-type]
    with (
        mock.patch.object(torch.cuda, "get_device_properties", lambda _: properties),
        pytest.raises(ConfigError, match=r"copy of a rank's state .* has 1.00 MiB: use more ranks"),
    ):
        recomputed_by_all(config_of("auto"), world)
