"""A node's own copies of shards: used when they are what was written, passed over when they are not."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest

from tests.checkpoint_tools.saves import entries_of
from zslurm.checkpoint_tools import (
    BufferEntry,
    Checkpoint,
    Damaged,
    Tensor,
    WriteFailed,
    assemble,
    begin,
    commit,
    forget_copies,
    keep_copy,
    local_tier,
    write_shard,
)

from .test_damage import flip

TABLE = [Tensor("w", (600,), {"master": "F32"}), Tensor("v", (5, 7), {"master": "F32", "momentum": "F32"})]
RANKS = 3


def save_with_copies(root: Path, tier: Path, step: int, *, kept_by: range = range(RANKS)) -> Path:
    """A checkpoint, of which some ranks keep copies."""
    directory = begin(root, step, "n")
    reports = []
    for rank in range(RANKS):
        entries = entries_of(TABLE, rank, RANKS, step)
        buffers = [BufferEntry(f"rng/{rank}", np.arange(4, dtype=np.uint8))]
        reports.append(write_shard(directory, rank, RANKS, entries, buffers, block_size=256))
        if rank in kept_by:
            copy = keep_copy(tier, step, reports[-1], entries, buffers)
            forget_copies(tier, rank, but=copy)
    names = [f"rng/{rank}" for rank in range(RANKS)]
    manifest = assemble(reports, step=step, tokens=0, model={}, cursor={}, state={}, tensors=TABLE, buffers=names)
    return commit(root, directory, manifest)


def read(path: Path, tier: Path | None) -> tuple[bytes, float]:
    """All that a checkpoint holds, and the share of it that came from copies."""
    content = b""
    with Checkpoint.open(path, local=tier) as checkpoint:
        for tensor in TABLE:
            for state in tensor.states:
                out = np.empty(tensor.numel, np.float32)
                checkpoint.read(tensor.name, state, 0, tensor.numel, out)
                content += out.tobytes()
        for name in checkpoint.buffers:
            content += checkpoint.read_buffer(name).tobytes()
        return content, checkpoint.local_bytes / checkpoint.bytes


@pytest.fixture
def tier(tmp_path: Path) -> Path:
    return local_tier(tmp_path / "nvme", tmp_path / "checkpoints")


def test_copies_are_read_instead_of_the_shards(tmp_path: Path, tier: Path) -> None:
    path = save_with_copies(tmp_path / "checkpoints", tier, 1)
    expected, share = read(path, None)
    assert share == 0
    assert read(path, tier) == (expected, 1)
    for shard in path.glob("shard-*"):  # the size is all that is left of them
        shard.write_bytes(bytes(shard.stat().st_size))
    assert read(path, tier) == (expected, 1)


def test_a_copy_that_is_missing_is_passed_over(tmp_path: Path, tier: Path) -> None:
    path = save_with_copies(tmp_path / "checkpoints", tier, 1, kept_by=range(1))
    expected, _ = read(path, None)
    content, share = read(path, tier)
    assert content == expected
    assert 0 < share < 1
    assert read(path, tmp_path / "nothing here") == (expected, 0)


@pytest.mark.parametrize("byte", [3, 300, -1])
def test_a_damaged_copy_is_passed_over_even_in_the_middle(tmp_path: Path, tier: Path, byte: int) -> None:
    path = save_with_copies(tmp_path / "checkpoints", tier, 1)
    expected, _ = read(path, None)
    for copy in tier.iterdir():
        flip(copy, 8 * (byte % copy.stat().st_size))
    content, share = read(path, tier)
    assert content == expected
    assert share < 1


def test_truncated_and_foreign_copies_are_passed_over(tmp_path: Path, tier: Path) -> None:
    path = save_with_copies(tmp_path / "checkpoints", tier, 1)
    expected, _ = read(path, None)
    first, second, third = sorted(tier.iterdir())
    os.truncate(first, 100)
    second.unlink()
    os.mkfifo(second)
    third.unlink()
    third.mkdir()
    assert read(path, tier) == (expected, 0)


def test_damage_in_both_is_an_error(tmp_path: Path, tier: Path) -> None:
    path = save_with_copies(tmp_path / "checkpoints", tier, 1)
    for file in [*tier.iterdir(), *path.glob("shard-*")]:
        flip(file, 8 * (file.stat().st_size - 1))
    with pytest.raises(Damaged, match="checkpoints"):
        read(path, tier)


def test_the_copy_of_another_save_is_noticed(tmp_path: Path, tier: Path) -> None:
    save_with_copies(tmp_path / "checkpoints", tier, 1)
    other = save_with_copies(tmp_path / "others", tmp_path / "unused", 2)
    for copy in list(tier.iterdir()):
        copy.rename(tier / copy.name.replace("00000001", "00000002"))
    expected, _ = read(other, None)
    content, share = read(other, tier)
    assert content == expected
    assert share < 1


def test_each_rank_keeps_one_copy_and_runs_do_not_mix(tmp_path: Path, tier: Path) -> None:
    root = tmp_path / "checkpoints"
    save_with_copies(root, tier, 1)
    save_with_copies(root, tier, 2)
    assert len(list(tier.iterdir())) == RANKS
    assert all(copy.name.startswith("step-00000002.") for copy in tier.iterdir())
    assert local_tier(tmp_path / "nvme", tmp_path / "other") != tier
    for rank in range(RANKS):
        forget_copies(tier, rank)
    assert not tier.exists()


def test_memory_that_changes_under_the_copy_is_noticed(tmp_path: Path, tier: Path) -> None:
    directory = begin(tmp_path / "checkpoints", 1, "n")
    report = write_shard(directory, 0, RANKS, entries_of(TABLE, 0, RANKS, 1), block_size=256)
    with pytest.raises(WriteFailed, match="memory changed"):
        keep_copy(tier, 1, report, entries_of(TABLE, 0, RANKS, 2), [])
    assert list(tier.iterdir()) == []
