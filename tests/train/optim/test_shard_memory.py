"""What `sharded_bytes` returns is what is allocated."""

from __future__ import annotations

import gc
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.train.loop.curves import MODEL
from tests.train.ranks import in_group
from zslurm.train.config import ModelConfig, OptimConfig, ParallelConfig
from zslurm.train.model.zaya import build
from zslurm.train.optim.sharded import ShardedOptimizer
from zslurm.train.parallel.levels import make_levels
from zslurm.train.parallel.memory import sharded_bytes
from zslurm.train.parallel.topology import Topology
from zslurm.train.parallel.world import DTYPES
from zslurm.train.parallel.zero import ZeroShards
from zslurm.train.shapes import owned_table


def allocated(
    group: dist.ProcessGroup,
    settings: dict[str, Any],
    matrices: str,
    bucket_mb: float,
    topology: Topology | None = None,
) -> tuple[int, dict[str, int]]:
    """Bytes of all tensors that shards and optimizer keep, and what they should be."""
    parallel, bucket_bytes = ParallelConfig(**settings), bucket_mb * 2**20
    optim = OptimConfig(matrices=matrices)  # type: ignore[arg-type]
    model = build(MODEL, 0, dtype=DTYPES[parallel.dtype])
    shards = ZeroShards(
        model,
        owned_table(MODEL, optim),
        group,
        levels=None if topology is None else make_levels(topology, dist.get_rank(group)),
        gradient_dtype=DTYPES[parallel.gradient_dtype],
        reduce_dtype=DTYPES[parallel.reduce_dtype or parallel.gradient_dtype],
        bucket_bytes=bucket_bytes,
    )
    optimizer = ShardedOptimizer(shards, optim)
    bias = model.balancing_bias.untyped_storage().data_ptr()
    gc.collect()
    storages = {
        found.untyped_storage().data_ptr(): found.untyped_storage().nbytes()
        for found in gc.get_objects()
        if isinstance(found, torch.Tensor)
    }
    del optimizer
    total = sum(size for pointer, size in storages.items() if pointer != bias)
    size, position = dist.get_world_size(group), shards.position
    planned = sharded_bytes(MODEL, optim, parallel, size, position, bucket_bytes=bucket_bytes, topology=topology)
    return total, planned


@pytest.mark.parametrize(
    ("ranks", "settings", "matrices", "bucket_mb"),
    [
        (1, {"dtype": "fp32"}, "muon", 64),
        (2, {"dtype": "bf16"}, "muon", 0.01),
        (3, {"dtype": "bf16", "reduce_dtype": "bf16"}, "muon", 0.05),
        (2, {"dtype": "fp64", "reduce_dtype": "bf16"}, "muon", 64),
        (2, {"dtype": "bf16", "gradient_dtype": "bf16"}, "adamw", 64),
    ],
)
def test_every_buffer_is_in_the_plan_and_no_other(
    ranks: int, settings: dict[str, Any], matrices: str, bucket_mb: float
) -> None:
    for total, planned in in_group(allocated, ranks, settings, matrices, bucket_mb):
        assert total == sum(planned.values()), planned


@pytest.mark.parametrize(
    ("topology", "settings", "bucket_mb"),
    [
        (Topology(2, 2), {"dtype": "bf16"}, 0.01),
        (Topology(3, 2), {"dtype": "bf16", "reduce_dtype": "bf16"}, 64),
    ],
    ids=str,
)
def test_what_two_levels_take_is_in_the_plan(
    topology: Topology, settings: dict[str, Any], bucket_mb: float
) -> None:
    for total, planned in in_group(allocated, topology.ranks, settings, "muon", bucket_mb, topology):
        assert total == sum(planned.values()), planned
        assert planned["between two levels"] > 0


def test_zaya1_base_on_eight_ranks() -> None:
    """In bf16 with fp32 gradients: 2 + 4 bytes of all 8.84 billion parameters, and an eighth of the rest."""
    planned = sharded_bytes(ModelConfig(), OptimConfig(), ParallelConfig(), 8, 0, bucket_bytes=2**26)
    parameters = 8_840_488_784
    assert planned["weights"] == pytest.approx(2 * parameters, rel=1e-3)
    assert planned["gradients"] == pytest.approx(4 * parameters, rel=1e-3)
    assert planned["master weights"] == pytest.approx(4 * parameters / 8, rel=1e-2)
    assert planned["optimizer state"] == pytest.approx((4 * parameters + 4 * 551_321_424) / 8, rel=1e-2)
    assert planned["exchange of matrices"] == pytest.approx(8 * 8_289_167_360 / 8, rel=1e-2)
    assert planned["staging"] == 0
