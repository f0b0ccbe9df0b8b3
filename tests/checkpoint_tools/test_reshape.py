"""What N ranks saved, M ranks read back bit for bit."""

from __future__ import annotations

import tempfile
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.checkpoint_tools.saves import ADAM, MUON, TENSORS, assert_holds, save, values
from zslurm.checkpoint_tools import Checkpoint, Mismatch, Tensor, partition
from zslurm.checkpoint_tools.format.shard_header import DTYPES
from zslurm.checkpoint_tools.read import OPEN_FILES

flat = st.builds(Tensor, st.just(""), st.lists(st.integers(0, 12), max_size=3).map(tuple), st.just(ADAM))
whole = st.builds(
    lambda count, rows, columns: Tensor("", (count, rows, columns), MUON, whole=count),
    st.integers(1, 6),
    st.integers(0, 12),
    st.integers(1, 12),
)
tables = st.lists(st.one_of(flat, whole), max_size=6).map(
    lambda rows: [replace(row, name=f"t{index}") for index, row in enumerate(rows)]
)


@settings(max_examples=60, deadline=None)
@given(tables, st.integers(1, 9), st.integers(1, 9), st.integers(1, 2000))
def test_any_world_size_reads_what_any_other_saved(
    tensors: list[Tensor], writers: int, readers: int, block_size: int
) -> None:
    with tempfile.TemporaryDirectory() as root:
        path = save(Path(root), 5, tensors, writers, block_size=block_size)
        by_name = {tensor.name: tensor for tensor in tensors}
        layout = partition(tensors, readers)
        for rank in range(readers):
            with Checkpoint.open(path, check_files=False) as checkpoint:
                for extent in layout.extents(rank):
                    tensor = by_name[extent.tensor]
                    for state, dtype in tensor.states.items():
                        out = np.zeros(extent.numel, DTYPES[dtype])
                        checkpoint.read(tensor.name, state, extent.start, extent.stop, out)
                        expected = values(tensor, state, 5)[extent.start : extent.stop]
                        assert out.tobytes() == expected.tobytes()


def test_reading_many_shards_holds_few_files_open(tmp_path: Path) -> None:
    tensors = [Tensor("experts", (64, 32), {"master": "F32"})]
    path = save(tmp_path, 1, tensors, world_size=3 * OPEN_FILES)
    descriptors = Path("/proc/self/fd")
    before = len(list(descriptors.iterdir()))
    with Checkpoint.open(path) as checkpoint:
        checkpoint.read("experts", "master", 0, 64 * 32, np.empty(64 * 32, np.float32))
        assert len(list(descriptors.iterdir())) == before + OPEN_FILES + 1
    assert len(list(descriptors.iterdir())) == before


def test_a_checkpoint_that_is_renamed_while_it_is_read_stays_the_same(tmp_path: Path) -> None:
    path = save(tmp_path, 1)
    with Checkpoint.open(path) as checkpoint:
        path.rename(tmp_path / "moved")
        save(tmp_path, 1, content=2)
        out = np.empty(7, np.float32)
        checkpoint.read("layers.0.norm.scale", "master", 0, 7, out)
    assert out.tobytes() == values(TENSORS[2], "master", 1).tobytes()


def test_blocks_larger_than_the_files_are_fine(tmp_path: Path) -> None:
    assert_holds(save(tmp_path, 1, block_size=4 << 20), 1)


def test_reading_nothing_is_allowed(tmp_path: Path) -> None:
    with Checkpoint.open(save(tmp_path, 1)) as checkpoint:
        checkpoint.read("embed.weight", "master", 5, 5, np.empty(0, np.float32))


@pytest.mark.parametrize(
    ("tensor", "state", "start", "stop", "out", "message"),
    [
        ("head", "master", 0, 1, np.empty(1, np.float32), "no tensor 'head'"),
        ("embed.weight", "momentum", 0, 1, np.empty(1, np.float32), "no state 'momentum'"),
        ("embed.weight", "master", 0, 92, np.empty(92, np.float32), r"has elements \[0, 91\)"),
        ("embed.weight", "master", 3, 2, np.empty(0, np.float32), r"not \[3, 2\)"),
        ("embed.weight", "master", 0, 2, np.empty(3, np.float32), "array of 2 float32, got 3"),
        ("embed.weight", "exp_avg", 0, 2, np.empty(2, np.float32), "array of 2 uint16, got 2 float32"),
        ("embed.weight", "master", 0, 2, np.empty(4, np.float32)[::2], "contiguous"),
    ],
)
def test_a_read_that_does_not_fit_is_refused(
    tmp_path: Path, tensor: str, state: str, start: int, stop: int, out: np.ndarray, message: str
) -> None:
    with Checkpoint.open(save(tmp_path, 1)) as checkpoint, pytest.raises(Mismatch, match=message):
        checkpoint.read(tensor, state, start, stop, out)


def test_an_unknown_buffer_is_refused(tmp_path: Path) -> None:
    with Checkpoint.open(save(tmp_path, 1)) as checkpoint, pytest.raises(Mismatch, match="no buffer 'x'"):
        checkpoint.read_buffer("x")


def test_closing_twice_is_harmless(tmp_path: Path) -> None:
    checkpoint = Checkpoint.open(save(tmp_path, 1))
    checkpoint.close()
    checkpoint.close()
