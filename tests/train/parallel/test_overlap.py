"""Gradients are reduced during backward where something is left to do it: a GPU's network, or free cores."""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch

from zslurm.train.config import ParallelConfig
from zslurm.train.parallel.world import overlaps


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
