"""Whole saves and loads of small made-up models, as a trainer would do them, for the tests of this folder."""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from zslurm.checkpoint_tools import (
    BufferEntry,
    Checkpoint,
    Entry,
    Manifest,
    ShardReport,
    Tensor,
    assemble,
    begin,
    commit,
    partition,
    write_shard,
)
from zslurm.checkpoint_tools.durable import At, no_fault_hook
from zslurm.checkpoint_tools.format.shard_header import DTYPES

Array = npt.NDArray[Any]

ADAM = {"master": "F32", "exp_avg": "BF16", "exp_avg_sq": "F32"}
MUON = {"master": "F32", "momentum": "F64"}
TENSORS = (
    Tensor("embed.weight", (13, 7), ADAM),
    Tensor("layers.0.experts.up", (3, 11, 5), MUON, whole=3),
    Tensor("layers.0.norm.scale", (7,), ADAM),
    Tensor("layers.0.temperature", (), ADAM),
    Tensor("layers.0.unused", (0, 4), ADAM),
)
BUFFERS: Mapping[str, Array] = {
    "layers.0.balancing_bias": np.linspace(-1, 1, 3, dtype=np.float32),
    "rng.rank-0": np.arange(16, dtype=np.uint8),
    "tokens_per_expert": np.array([[1, 2], [3, 2**40]], dtype=np.int64),
}


def values(tensor: Tensor, state: str, step: int = 0) -> Array:
    """The elements of a tensor's state, flat: random bits that depend on nothing but the arguments."""
    dtype = DTYPES[tensor.states[state]]
    random = np.random.default_rng(zlib.crc32(f"{tensor.name}:{state}:{step}".encode()))
    return np.frombuffer(random.bytes(tensor.numel * dtype.itemsize), dtype)


def entries_of(tensors: Sequence[Tensor], rank: int, world_size: int, step: int = 0) -> list[Entry]:
    """What `rank` writes of `tensors`."""
    by_name = {tensor.name: tensor for tensor in tensors}
    return [
        Entry(
            extent.tensor,
            state,
            extent.start,
            extent.stop,
            values(by_name[extent.tensor], state, step)[extent.start : extent.stop],
            dtype,
        )
        for extent in partition(tensors, world_size).extents(rank)
        for state, dtype in by_name[extent.tensor].states.items()
    ]


def write_all_ranks(
    directory: Path,
    tensors: Sequence[Tensor],
    world_size: int,
    step: int = 0,
    block_size: int = 256,
    at: At = no_fault_hook,
) -> list[ShardReport]:
    """The shards of all ranks, with BUFFERS in rank 0's; reports travel as JSON, as they would between ranks."""
    reports = []
    for rank in range(world_size):
        buffers = [BufferEntry(name, array) for name, array in BUFFERS.items()] if rank == 0 else []
        entries = entries_of(tensors, rank, world_size, step)
        report = write_shard(directory, rank, world_size, entries, buffers, block_size=block_size, at=at)
        reports.append(ShardReport.from_json(report.to_json()))
    return reports


def manifest_of(reports: Iterable[ShardReport], tensors: Sequence[Tensor], step: int) -> Manifest:
    """The manifest of a save, with some opaque content."""
    return assemble(
        reports,
        step=step,
        tokens=step * 4096,
        model={"layers": 1, "hidden": 7, "rope_base": 1e6},
        cursor={"seed": 17, "counter": step * 8},
        state={"phase": 0, "attempt": "1"},
        tensors=tensors,
        buffers=BUFFERS.keys(),
    )


def save(
    root: Path,
    step: int,
    tensors: Sequence[Tensor] = TENSORS,
    world_size: int = 2,
    *,
    nonce: str = "first",
    block_size: int = 256,
    content: int | None = None,
    at: At = no_fault_hook,
) -> Path:
    """A committed checkpoint of `step`; `content` (the step, if not given) decides its elements."""
    directory = begin(root, step, nonce, at=at)
    content = step if content is None else content
    reports = write_all_ranks(directory, tensors, world_size, content, block_size, at)
    return commit(root, directory, manifest_of(reports, tensors, step), at=at)


def assert_holds(path: Path, content: int, tensors: Sequence[Tensor] = TENSORS) -> None:
    """Read every element and buffer of a checkpoint and compare it with what was saved."""
    with Checkpoint.open(path) as checkpoint:
        for tensor in tensors:
            assert checkpoint.shape(tensor.name) == tensor.shape
            for state in tensor.states:
                expected = values(tensor, state, content)
                assert read_all(checkpoint, tensor, state).tobytes() == expected.tobytes()
        for name, expected in BUFFERS.items():
            found = checkpoint.read_buffer(name)
            assert found.dtype == expected.dtype
            np.testing.assert_array_equal(found, expected)


def read_all(checkpoint: Checkpoint, tensor: Tensor, state: str) -> Array:
    """All elements of a tensor's state, flat."""
    out = np.empty(tensor.numel, DTYPES[tensor.states[state]])
    checkpoint.read(tensor.name, state, 0, tensor.numel, out)
    return out


def read_everything(path: Path) -> None:
    """Open a checkpoint and read every byte of it, for whatever that raises."""
    with Checkpoint.open(path) as checkpoint:
        for tensor in checkpoint.manifest.tensors:
            for state in tensor.states:
                read_all(checkpoint, tensor, state)
        for name in checkpoint.buffers:
            checkpoint.read_buffer(name)
