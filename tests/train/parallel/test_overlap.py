"""Gradients are reduced during backward if something is left to do it: a GPU's network, or free cores."""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.train.models import scrambled
from tests.train.ranks import in_group
from tests.train.runs import MODEL
from zslurm.train.assembly import agree_on_facts, shard
from zslurm.train.config import ParallelConfig, TrainConfig
from zslurm.train.parallel.world import World, least_of_all, overlaps


@pytest.mark.parametrize(
    ("asked", "device", "cores", "ranks", "threads", "expected"),
    [
        ("auto", "cuda", 8, 8, 1, True),
        ("auto", "cpu", 2, 2, 1, False),
        ("auto", "cpu", 8, 2, 4, False),
        ("auto", "cpu", 8, 2, 3, True),
        (True, "cpu", 2, 2, 1, True),
        (False, "cuda", 8, 1, 1, False),
    ],
)
def test_auto_asks_for_cores_that_no_rank_computes_on(
    monkeypatch: pytest.MonkeyPatch, asked: Any, device: str, cores: int, ranks: int, threads: int, expected: bool
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(cores)))
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", str(ranks))
    monkeypatch.delenv("ZSLURM_CORE_RANKS", raising=False)
    assert overlaps(ParallelConfig(overlap=asked), torch.device(device)) is expected


def test_a_launcher_that_gives_ranks_cores_is_believed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Eight ranks of a node, two of which share these four cores."""
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(4)))
    monkeypatch.setattr(torch, "get_num_threads", lambda: 1)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "8")
    monkeypatch.setenv("ZSLURM_CORE_RANKS", "2")
    assert overlaps(ParallelConfig(), torch.device("cpu"))


def choices(group: dist.ProcessGroup) -> tuple[bool, list[float]]:
    """Whether a rank overlaps, of two of which one shares its cores; and the least of what the two have."""
    rank, size = group.rank(), group.size()
    os.environ["ZSLURM_CORE_RANKS"] = "0" if rank == 0 else "999"
    config = TrainConfig.model_validate(
        {
            "run": {"name": "tiny"},
            "model": MODEL,
            "data": {"path": "/none"},
            "phases": [{"tokens": 64, "context": 16, "global_batch": 4, "micro_batch": 1, "lr": 1e-2}],
        }
    )
    world = World(rank, size, size, torch.device("cpu"), group, dist.HashStore())
    assert overlaps(config.parallel, world.device) is (rank == 0)
    facts = agree_on_facts(config, world, 0, None, two_level=False)
    shards = shard(scrambled(config.model), config, world, None, facts)
    return shards.overlap, least_of_all([rank, -rank], world)


def test_ranks_with_unlike_cores_overlap_alike() -> None:
    """A rank that waits for a reduction in its backward pass would hold up one that reduces after its own."""
    assert in_group(choices, 2) == [(False, [0, -1])] * 2
