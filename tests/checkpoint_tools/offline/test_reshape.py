"""`reshape` writes the same checkpoint for another number of ranks, or nothing at all."""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.checkpoint_tools.saves import TENSORS, assert_holds, save
from tests.checkpoint_tools.test_damage import flip
from tests.checkpoint_tools.test_reshape import tables
from zslurm.checkpoint_tools import (
    Checkpoint,
    CheckpointError,
    Damaged,
    Mismatch,
    NoSpace,
    NotACheckpoint,
    Tensor,
    WriteFailed,
    compare,
    list_checkpoints,
    partition,
    plan_reshape,
    reshape,
    verify,
)

SKEWED = [Tensor("one", (1, 3, 500), {"master": "F32"}), Tensor("many", (40, 2, 3), {"master": "F32"})]


def assert_same(first: Path, second: Path) -> None:
    with Checkpoint.open(first) as one, Checkpoint.open(second) as other:
        found = compare(one, other)
        assert found.same_values
        assert found.facts.keys() <= {"world_size"}


@settings(max_examples=40, deadline=None)
@given(tables, st.integers(1, 16), st.integers(1, 16), st.integers(1, 2000))
def test_there_and_back_is_bit_identical(tensors: list[Tensor], n: int, m: int, block_size: int) -> None:
    m = max(1, min(m, sum(tensor.numel for tensor in tensors)))
    with tempfile.TemporaryDirectory() as name:
        root = Path(name)
        start = save(root / "start", 5, tensors, n, block_size=block_size)
        there = root / "there"
        reshape(start, there, m)
        assert_same(start, there)
        with Checkpoint.open(there) as checkpoint:
            assert len(checkpoint.manifest.files) == checkpoint.manifest.world_size == m
        if n <= max(1, sum(tensor.numel for tensor in tensors)):
            reshape(there, root / "back", n)
            assert_same(start, root / "back")


@pytest.mark.parametrize(("n", "m"), [(1, 16), (16, 1), (7, 3), (3, 11)])
def test_one_large_tensor_and_many_small_ones_survive(tmp_path: Path, n: int, m: int) -> None:
    start = save(tmp_path, 3, SKEWED, n)
    reshape(start, tmp_path / "there", m, workers=3)
    reshape(tmp_path / "there", tmp_path / "back", n)
    assert_same(start, tmp_path / "back")


def test_each_new_rank_finds_its_extents_whole_in_its_own_shard(tmp_path: Path) -> None:
    start = save(tmp_path, 3, world_size=3)
    reshape(start, tmp_path / "there", 2)
    with Checkpoint.open(tmp_path / "there") as checkpoint:
        stored = {(e.tensor, e.state, e.start, e.stop, e.file) for e in checkpoint.manifest.extents}
        layout = partition(checkpoint.manifest.tensors, 2)
    states = {tensor.name: tensor.states for tensor in TENSORS}
    expected = {
        (e.tensor, state, e.start, e.stop, f"shard-{rank:05d}-of-00002.safetensors")
        for rank in range(2)
        for e in layout.extents(rank)
        for state in states[e.tensor]
    }
    assert stored == expected


def test_it_can_be_listed_read_and_verified_like_any_other(tmp_path: Path) -> None:
    start = save(tmp_path / "old", 400, world_size=4)
    reshape(start, tmp_path / "new" / "step-00000400", 6)
    (listing,) = list_checkpoints(tmp_path / "new")
    assert (listing.complete, listing.step, listing.world_size) == (True, 400, 6)
    assert_holds(listing.path, 400)
    assert verify(listing.path).sound


def test_the_plan_says_what_is_written(tmp_path: Path) -> None:
    start = save(tmp_path, 3, world_size=4)
    plan = plan_reshape(start, tmp_path / "new", 3)
    assert not (tmp_path / "new").exists()
    assert plan == reshape(start, tmp_path / "new", 3)
    sizes = [file.stat().st_size for file in (tmp_path / "new").glob("shard-*")]
    assert (plan.files, plan.bytes, plan.largest_file) == (3, sum(sizes), max(sizes))


def test_progress_counts_every_byte_of_both_stages(tmp_path: Path) -> None:
    start = save(tmp_path, 3, world_size=2)
    seen: list[tuple[str, int, int]] = []
    plan = reshape(start, tmp_path / "new", 5, report=lambda *row: seen.append(row))
    written = [row for row in seen if row[0] == "writing"]
    assert written[-1] == ("writing", plan.bytes, plan.bytes)
    assert seen[-1][0] == "verifying"
    assert seen[-1][1] == seen[-1][2]


@pytest.mark.parametrize(("ranks", "problem"), [(0, "over 0 ranks"), (-3, "over -3"), (10**9, "over 1000000000")])
def test_a_number_of_ranks_that_makes_no_sense_is_refused(tmp_path: Path, ranks: int, problem: str) -> None:
    start = save(tmp_path, 3)
    with pytest.raises(Mismatch, match=problem):
        reshape(start, tmp_path / "new", ranks)
    assert not (tmp_path / "new").exists()


def test_a_destination_that_exists_or_lies_inside_is_refused(tmp_path: Path) -> None:
    start = save(tmp_path, 3)
    (tmp_path / "there").mkdir()
    (tmp_path / "link").symlink_to(start)
    for place, problem in [
        (tmp_path / "there", "exists"),
        (start, "exists"),
        (start / "sub" / "dir", "inside"),
        (tmp_path / "link" / "sub", "inside"),
    ]:
        with pytest.raises(Mismatch, match=problem):
            reshape(start, place, 2)
    assert_holds(start, 3)


def test_what_is_no_checkpoint_is_refused(tmp_path: Path) -> None:
    with pytest.raises(NotACheckpoint):
        reshape(tmp_path, tmp_path / "new", 2)


def test_memory_for_less_than_one_worker_is_refused(tmp_path: Path) -> None:
    start = save(tmp_path, 3, block_size=1 << 20)
    with pytest.raises(Mismatch, match=r"one worker needs 12\.0 MiB"):
        plan_reshape(start, tmp_path / "new", 2, max_memory=1 << 20)
    assert plan_reshape(start, tmp_path / "new", 9, workers=8, max_memory=40 << 20).workers == 3


def test_too_little_space_is_found_before_anything_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    start = save(tmp_path, 3)
    real = os.statvfs(tmp_path)
    nearly_full = os.statvfs_result((*real[:4], 1, *real[5:]))
    monkeypatch.setattr(os, "statvfs", lambda path: nearly_full)
    began = lambda *_, **__: pytest.fail("it began to write")  # noqa: E731
    monkeypatch.setattr(sys.modules["zslurm.checkpoint_tools.offline.reshape"], "write_rows", began)
    with pytest.raises(NoSpace, match="free space"):
        reshape(start, tmp_path / "deep" / "new", 2)
    assert not (tmp_path / "deep").exists()


def names(root: Path) -> list[str]:
    return sorted(path.name for path in root.iterdir())


def test_damage_in_the_source_is_found_and_leaves_nothing(tmp_path: Path) -> None:
    start = save(tmp_path, 3)
    shard = start / "shard-00001-of-00002.safetensors"
    flip(shard, 8 * (shard.stat().st_size - 1))
    with pytest.raises(Damaged, match="shard-00001-of-00002"):
        reshape(start, tmp_path / "new", 5)
    assert names(tmp_path) == ["step-00000003"]


def test_a_disk_that_fails_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    start = save(tmp_path, 3)

    def full(*_: Any) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "writev", full)
    with pytest.raises(NoSpace):
        reshape(start, tmp_path / "new", 2)
    assert names(tmp_path) == ["step-00000003"]


def test_what_does_not_read_back_is_not_committed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    start = save(tmp_path, 3)
    module = sys.modules["zslurm.checkpoint_tools.offline.reshape"]

    def damaging(directory: Path, **options: Any) -> Any:
        flip(directory / "shard-00000-of-00002.safetensors", 8 * 100)
        return verify(directory, **options)

    monkeypatch.setattr(module, "verify", damaging)
    with pytest.raises(WriteFailed, match="does not read back"):
        reshape(start, tmp_path / "new", 2)
    assert names(tmp_path) == ["step-00000003"]


def test_an_interrupt_leaves_nothing(tmp_path: Path) -> None:
    start = save(tmp_path, 3)

    def interrupt(stage: str, done: int, total: int) -> None:
        raise KeyboardInterrupt

    with pytest.raises((KeyboardInterrupt, CheckpointError)):
        reshape(start, tmp_path / "new", 2, report=interrupt)
    assert names(tmp_path) == ["step-00000003"]


def test_what_a_killed_reshape_left_is_removed_by_the_next(tmp_path: Path) -> None:
    start = save(tmp_path, 3)
    program = f"""
import os, signal, sys
from pathlib import Path
from zslurm.checkpoint_tools import reshape
kill = lambda stage, done, total: os.kill(os.getpid(), signal.SIGKILL)
reshape(Path({str(start)!r}), Path({str(tmp_path / "new")!r}), 2, report=kill)
"""
    killed = subprocess.run([sys.executable, "-c", program], check=False)
    assert killed.returncode == -signal.SIGKILL
    assert len(names(tmp_path)) == 2
    assert list_checkpoints(tmp_path)[0].path == start
    reshape(start, tmp_path / "new", 2)
    assert names(tmp_path) == ["new", "step-00000003"]
    assert_same(start, tmp_path / "new")
