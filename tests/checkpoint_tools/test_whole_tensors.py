"""A checkpoint in a notebook: names, whole tensors, everything at once, and what it shows of itself."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from tests.checkpoint_tools.saves import BUFFERS, TENSORS, save, values
from zslurm.checkpoint_tools import Checkpoint, Mismatch, list_checkpoints, plan_reshape, reshape, verify


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return save(tmp_path / "checkpoints", 7, world_size=3, content=0)


def test_whole_tensors_have_their_shape_and_the_values_that_were_written(path: Path) -> None:
    with Checkpoint.open(str(path)) as checkpoint:
        assert checkpoint.names() == [*(tensor.name for tensor in TENSORS), *BUFFERS]
        for tensor in TENSORS:
            found = checkpoint.numpy(tensor.name)
            assert (found.shape, found.dtype) == (tensor.shape, np.float32)
            assert found.tobytes() == values(tensor, "master").tobytes()
        for name, buffer in BUFFERS.items():
            assert np.array_equal(checkpoint.numpy(name), buffer)


def test_bfloat16_is_widened_exactly(path: Path) -> None:
    embedding = TENSORS[0]
    with Checkpoint.open(path) as checkpoint:
        found = checkpoint.numpy(embedding.name, "exp_avg")
    assert (found.shape, found.dtype) == (embedding.shape, np.float32)
    bits = values(embedding, "exp_avg").astype(np.uint32) << 16
    assert found.tobytes() == bits.tobytes()


def test_a_state_dict_has_every_tensor_with_that_state_and_the_buffers(path: Path) -> None:
    with Checkpoint.open(path) as checkpoint:
        masters, momenta = checkpoint.state_dict(), checkpoint.state_dict("momentum")
        assert list(masters) == checkpoint.names()
        assert list(momenta) == ["layers.0.experts.up", *BUFFERS]
        assert momenta["layers.0.experts.up"].shape == (3, 11, 5)
        with pytest.raises(Mismatch, match=r"no state 'velocity' of any tensor, only exp_avg, exp_avg_sq, master"):
            checkpoint.state_dict("velocity")
        with pytest.raises(Mismatch, match=r"no tensor 'layers\.9'"):
            checkpoint.numpy("layers.9")


def test_it_shows_where_it_is_and_how_much_is_in_it(path: Path) -> None:
    with Checkpoint.open(path) as checkpoint:
        shown = repr(checkpoint)
    assert str(path) in shown
    assert "5 tensors of 264 numbers, 3 buffers, written by 3 ranks" in shown
    assert repr(checkpoint).endswith(", closed)")


def test_paths_may_be_text(path: Path, tmp_path: Path) -> None:
    copy = str(tmp_path / "copy")
    assert [found.path for found in list_checkpoints(str(path.parent))] == [path]
    assert plan_reshape(str(path), copy, 2).to_ranks == reshape(str(path), copy, 2).to_ranks == 2
    assert verify(copy).sound
