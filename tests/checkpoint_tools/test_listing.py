"""Which checkpoints there are, which are kept, and that junk does no harm."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest

from tests.checkpoint_tools.saves import save
from zslurm.checkpoint_tools import Checkpoint, Mismatch, NotACheckpoint, ReadFailed, list_checkpoints, prune
from zslurm.checkpoint_tools.listing import newest_committed


def steps(root: Path) -> list[int]:
    return [found.step for found in list_checkpoints(root)]


def test_checkpoints_are_listed_newest_first(tmp_path: Path) -> None:
    for step in (20, 100, 3, 123456789):
        save(tmp_path, step, world_size=3)
    listed = list_checkpoints(tmp_path)
    assert [found.step for found in listed] == [123456789, 100, 20, 3]
    assert [found.tokens for found in listed] == [found.step * 4096 for found in listed]
    assert all(found.complete and found.world_size == 3 for found in listed)


def test_a_run_that_never_saved_has_no_checkpoints(tmp_path: Path) -> None:
    assert list_checkpoints(tmp_path / "absent") == []
    assert list_checkpoints(tmp_path) == []


def test_a_root_that_cannot_be_listed_is_not_an_empty_one(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ReadFailed, match="Not a directory"):
        list_checkpoints(tmp_path / "file")


def test_each_broken_directory_has_its_reason(tmp_path: Path) -> None:
    whole = save(tmp_path, 1)
    for step in range(2, 9):
        shutil.copytree(whole, tmp_path / f"step-{step:08d}")
    path = {step: tmp_path / f"step-{step:08d}" for step in range(2, 10)}
    (path[2] / "manifest.json").unlink()
    (path[3] / "manifest.json").write_text("{}")
    (path[4] / "manifest.json").write_bytes(os.urandom(1000))
    (path[5] / "shard-00000-of-00002.safetensors").unlink()
    (path[6] / "manifest.json").unlink()
    (path[6] / "manifest.json").mkdir()
    shutil.rmtree(path[7])
    path[7].touch()
    (path[9]).symlink_to("nowhere")

    reasons = {found.step: found.reason or "" for found in list_checkpoints(tmp_path)}
    assert reasons[1] == ""
    for step, reason in {
        2: "never committed",
        3: "checksum",
        4: "checksum",
        5: "shard-00000-of-00002.safetensors is damaged: the file is missing",
        6: "Is a directory",
        7: "not a directory",
        8: "manifest is that of step 1: the directory was renamed",
        9: "not a directory",
    }.items():
        assert reason in reasons[step]


def test_other_names_are_passed_over(tmp_path: Path) -> None:
    whole = save(tmp_path, 1)
    for name in ["step-1", "step-000000001", "step-00000001x", "best", ".step-00000001.n.tmp", "step-"]:
        shutil.copytree(whole, tmp_path / name)
    assert steps(tmp_path) == [1]


def test_the_newest_by_name_is_never_a_save_in_progress_nor_what_was_replaced(tmp_path: Path) -> None:
    for name in ("step-00000400", "step-00000800.superseded", "step-00000800", ".step-00001200.n.tmp", "notes"):
        (tmp_path / name).mkdir()
    assert newest_committed(tmp_path) == tmp_path / "step-00000800"
    (tmp_path / "step-00000800").rename(tmp_path / "gone")
    assert newest_committed(tmp_path) == tmp_path / "step-00000800.superseded"
    assert newest_committed(tmp_path / "none") is None


@pytest.mark.parametrize("path", ["absent", "empty", "file"])
def test_what_is_no_checkpoint_is_not_opened(tmp_path: Path, path: str) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "file").touch()
    with pytest.raises(NotACheckpoint):
        Checkpoint.open(tmp_path / path)


def test_the_newest_are_kept(tmp_path: Path) -> None:
    for step in range(1, 6):
        save(tmp_path, step)
    assert prune(tmp_path, 2) == [tmp_path / f"step-{step:08d}" for step in (1, 2, 3)]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-00000004", "step-00000005"]
    assert prune(tmp_path, 2) == []


def test_every_nth_step_and_named_steps_stay_beyond_the_newest(tmp_path: Path) -> None:
    for step in range(1, 11):
        save(tmp_path, step)
    removed = prune(tmp_path, 2, keep_every=4, keep={3, 10, 77})
    assert [path.name for path in removed] == [f"step-{step:08d}" for step in (1, 2, 5, 6, 7)]
    assert steps(tmp_path) == [10, 9, 8, 4, 3]
    assert prune(tmp_path, 2, keep_every=4) == [tmp_path / "step-00000003"], "no longer the best one"
    assert prune(tmp_path, 1) == [tmp_path / f"step-{step:08d}" for step in (4, 8, 9)]


def test_a_kept_step_does_not_replace_the_newest(tmp_path: Path) -> None:
    """The newest k stay whatever else does: a resume never goes further back than it did."""
    for step in (1, 2, 3):
        save(tmp_path, step)
    assert prune(tmp_path, 1, keep={1}) == [tmp_path / "step-00000002"]
    assert steps(tmp_path) == [3, 1]


def test_a_broken_checkpoint_neither_counts_nor_goes(tmp_path: Path) -> None:
    for step in (1, 2, 3):
        save(tmp_path, step)
    (tmp_path / "step-00000003" / "manifest.json").unlink()
    assert prune(tmp_path, 1) == [tmp_path / "step-00000001"]
    assert steps(tmp_path) == [3, 2]


def test_the_last_checkpoint_cannot_be_pruned(tmp_path: Path) -> None:
    save(tmp_path, 1)
    with pytest.raises(Mismatch, match="at least 1"):
        prune(tmp_path, 0, keep={1})
    with pytest.raises(Mismatch, match="keep_every must be at least 0"):
        prune(tmp_path, 1, keep_every=-2)
    assert prune(tmp_path, 1) == []
    assert steps(tmp_path) == [1]
