"""When collectives are in two levels, and that a run, its curve and its checkpoints do not depend on it."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.train.ranks import in_group, train_on
from tests.train.runs import losses_of, make_corpus, make_run
from zslurm.train.config import ParallelConfig
from zslurm.train.parallel.levels import choose_levels
from zslurm.train.parallel.world import World


def chosen(
    group: dist.ProcessGroup, local_sizes: list[int], local_ranks: list[int], asked: str
) -> tuple[bool, str | None]:
    """Whether this rank gets levels, and the line on them."""
    rank, size = dist.get_rank(group), dist.get_world_size(group)
    os.environ["LOCAL_RANK"] = str(local_ranks[rank])
    world = World(rank, size, local_sizes[rank], torch.device("cpu"), group, dist.HashStore())
    levels, line = choose_levels(ParallelConfig(collectives=asked), world)  # type: ignore[arg-type]
    return levels is not None, line


@pytest.mark.parametrize(
    ("local_sizes", "local_ranks", "asked", "two_level", "line"),
    [
        ([2] * 4, [0, 1, 0, 1], "two_level", True, "2 ranks in each node, 2 nodes along each rail"),
        ([2] * 4, [0, 1, 0, 1], "auto", False, None),
        ([2] * 4, [0, 1, 0, 1], "flat", False, None),
        ([4] * 4, [0, 1, 2, 3], "two_level", False, "there is one node"),
        ([1] * 4, [0, 0, 0, 0], "two_level", False, "each node has one rank"),
        ([3, 3, 3, 1], [0, 1, 2, 0], "two_level", False, "nodes have 1 to 3 ranks"),
        ([2] * 4, [0, 0, 1, 1], "two_level", False, "ranks are not numbered node by node"),
    ],
)
def test_two_levels_are_used_where_they_are_asked_for_and_fit(
    local_sizes: list[int], local_ranks: list[int], asked: str, two_level: bool, line: str | None
) -> None:
    for found, said in in_group(chosen, 4, local_sizes, local_ranks, asked):
        assert found == two_level
        assert said is None if line is None else said is not None and line in said
        assert said is None or said.startswith("note: parallel.collectives") != two_level


FP64: dict[str, Any] = {"phase": {"lr": 1e-2}}


def test_a_checkpoint_moves_between_flat_collectives_and_two_levels_at_any_size(tmp_path: Path) -> None:
    """Two nodes of two write steps 3 to 9, three flat ranks continue at 3, and three nodes of two at 6."""
    corpus = make_corpus(tmp_path / "tokens.h5")

    def made(name: str, collectives: str) -> Path:
        parallel = {"dtype": "fp64", "collectives": collectives}
        return make_run(tmp_path / name, corpus, steps=9, parallel=parallel, **FP64)

    first = made("first", "two_level")
    done = train_on(first, 4, local_size=2)
    assert done.returncode == 0, done.stderr
    assert "collectives in two levels: 2 ranks in each node, 2 nodes along each rail" in done.stdout
    whole = losses_of(first)
    assert len(whole) == 9
    before = first
    for name, collectives, ranks, local_size, step in (
        ("flat", "flat", 3, 3, 3),
        ("again", "two_level", 6, 2, 6),
    ):
        run = made(name, collectives)
        shutil.copytree(before / "checkpoints" / f"step-{step:08d}", run / "checkpoints" / f"step-{step:08d}")
        done = train_on(run, ranks, local_size=local_size)
        assert done.returncode == 0, done.stderr
        assert f"resuming tiny from step-{step:08d}" in done.stdout
        assert ("two levels" in done.stdout) == (collectives == "two_level")
        assert losses_of(run) == pytest.approx(whole[step:], rel=1e-7)
        before = run
    manifest = json.loads((before / "checkpoints" / "step-00000009" / "manifest.json").read_text())
    assert manifest["world_size"] == 6
