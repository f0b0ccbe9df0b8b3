"""`zslurm.Checkpoint` from Python: opened by any reference, read, verified, rewritten."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

import zslurm
from tests.checkpoint_tools.saves import TENSORS, save
from zslurm.checkpoint_tools.format.layout import MANIFEST


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    root = tmp_path / "run" / "checkpoints"
    root.mkdir(parents=True)
    save(root, 400, world_size=2)
    return root


def test_it_is_opened_by_its_directory_by_the_directory_of_all_and_as_text(saved: Path) -> None:
    newest = saved / "step-00000400"
    for path in (newest, str(newest), saved, str(saved)):
        with zslurm.Checkpoint.open(path) as checkpoint:
            assert isinstance(checkpoint, zslurm.Checkpoint)
            assert checkpoint.path == newest
            assert checkpoint.manifest.step == 400
            names = checkpoint.names()
    assert names[: len(TENSORS)] == [tensor.name for tensor in TENSORS]


def test_a_notebook_shows_it(saved: Path) -> None:
    checkpoint = zslurm.Checkpoint.open(saved)
    assert "step 400" in repr(checkpoint)
    assert "<td>embed.weight</td><td>13 x 7</td><td>exp_avg, exp_avg_sq, master</td>" in checkpoint._repr_html_()
    checkpoint.close()


def test_it_is_verified_and_what_is_damaged_is_named(saved: Path) -> None:
    checkpoint = zslurm.Checkpoint.open(saved)
    assert checkpoint.verify().sound
    shard = next(path for path in checkpoint.path.iterdir() if path.suffix == ".safetensors")
    data = bytearray(shard.read_bytes())
    data[-1] ^= 1
    shard.write_bytes(data)
    found = checkpoint.verify()
    assert (found.sound, [damage.file for damage in found.damages]) == (False, [shard.name])


def test_it_is_rewritten_for_other_ranks_and_opened(saved: Path, tmp_path: Path) -> None:
    with zslurm.Checkpoint.open(saved) as checkpoint:
        before = checkpoint.state_dict()
        beside = checkpoint.reshape(3)
        elsewhere = checkpoint.reshape(5, str(tmp_path / "elsewhere"))
    assert (beside.path.name, beside.manifest.world_size) == ("step-00000400-dp3", 3)
    assert (elsewhere.path, elsewhere.manifest.world_size) == (tmp_path / "elsewhere", 5)
    after = elsewhere.state_dict()
    assert before.keys() == after.keys()
    for name, array in before.items():
        np.testing.assert_array_equal(array, after[name])
    with pytest.raises(zslurm.CheckpointError):
        beside.reshape(2, tmp_path / "elsewhere")


def test_one_that_is_not_there_or_damaged_is_an_error_of_the_family(saved: Path, tmp_path: Path) -> None:
    with pytest.raises(zslurm.NotFound):
        zslurm.Checkpoint.open(tmp_path / "nix")
    (saved / "step-00000400" / MANIFEST).write_text("{")
    with pytest.raises(zslurm.Error, match="damaged"):
        zslurm.Checkpoint.open(saved / "step-00000400")
