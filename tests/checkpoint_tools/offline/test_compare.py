"""Statistics of a tensor, and differences between checkpoints, against numpy on the whole arrays."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.checkpoint_tools.saves import save
from tests.checkpoint_tools.test_damage import flip
from zslurm.checkpoint_tools import (
    BufferEntry,
    Checkpoint,
    Damaged,
    Entry,
    Mismatch,
    Tensor,
    assemble,
    begin,
    commit,
    compare,
    partition,
    statistics,
    write_shard,
)
from zslurm.checkpoint_tools.offline import compare as compare_module

Arrays = dict[tuple[str, str], np.ndarray[Any, Any]]


def write(root: Path, arrays: Arrays, *, ranks: int = 1, seed: int = 0, bf16: bool = False) -> Path:
    """A checkpoint of these flat arrays, (tensor, state) -> values, and of one buffer."""
    names = {"float32": "F32", "float64": "F64", "uint16": "BF16", "uint8": "F8_E4M3"}
    tensors = []
    for name in dict.fromkeys(name for name, _ in arrays):
        states = {state: array for (owner, state), array in arrays.items() if owner == name}
        size = next(iter(states.values())).size
        tensors.append(Tensor(name, (size,), {state: names[array.dtype.name] for state, array in states.items()}))
    directory = begin(root, 7, "n")
    reports = []
    for rank in range(ranks):
        entries = [
            Entry(e.tensor, state, e.start, e.stop, arrays[e.tensor, state][e.start : e.stop], names[a.dtype.name])
            for e in partition(tensors, ranks).extents(rank)
            for (name, state), a in arrays.items()
            if name == e.tensor
        ]
        buffers = [BufferEntry("bias", np.full(3, seed, np.float32))] if rank == 0 else []
        reports.append(write_shard(directory, rank, ranks, entries, buffers, block_size=256))
    manifest = assemble(
        reports,
        step=7,
        tokens=70,
        model={"layers": 1},
        cursor={"seed": seed},
        state={},
        tensors=tensors,
        buffers=["bias"],
    )
    return commit(root, directory, manifest)


def normal(size: int, seed: int = 0) -> np.ndarray[Any, Any]:
    return np.random.default_rng(seed).normal(3, 2, size).astype(np.float32)


def test_statistics_are_numpy_s(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compare_module, "CHUNK", 100)
    values = normal(1234)
    values[5:9] = 0
    path = write(tmp_path, {("w", "master"): values}, ranks=3)
    with Checkpoint.open(path) as checkpoint:
        found = statistics(checkpoint, "w", "master")
    assert (found.elements, found.zeros, found.nans, found.infinities) == (1234, 4, 0, 0)
    assert (found.minimum, found.maximum) == (values.min(), values.max())
    wide = values.astype(np.float64)
    assert found.mean == pytest.approx(wide.mean())
    assert found.std == pytest.approx(wide.std())
    assert found.rms == pytest.approx(math.sqrt(np.square(wide).mean()))


def test_what_is_not_finite_is_counted_apart(tmp_path: Path) -> None:
    values = np.array([1, np.nan, -3, np.inf, -np.inf], np.float32)
    path = write(tmp_path, {("w", "master"): values, ("v", "master"): np.full(2, np.nan, np.float32)})
    with Checkpoint.open(path) as checkpoint:
        found = statistics(checkpoint, "w", "master")
        nothing = statistics(checkpoint, "v", "master")
    assert (found.nans, found.infinities, found.minimum, found.maximum, found.mean) == (1, 2, -3, 1, -1)
    assert nothing.nans == 2
    assert math.isnan(nothing.minimum)


def test_bfloat16_is_widened_and_float8_refused(tmp_path: Path) -> None:
    bits = np.array([0x3F80, 0xC000, 0x7F80], np.uint16)  # 1, -2, infinity
    path = write(tmp_path, {("w", "master"): bits, ("v", "master"): np.zeros(3, np.uint8)})
    with Checkpoint.open(path) as checkpoint:
        found = statistics(checkpoint, "w", "master")
        assert (found.minimum, found.maximum, found.infinities) == (-2, 1, 1)
        with pytest.raises(Mismatch, match="F8_E4M3 values are not interpreted"):
            statistics(checkpoint, "v", "master")
        with pytest.raises(Mismatch, match="no tensor 'u'"):
            statistics(checkpoint, "u", "master")


def test_the_same_values_at_another_world_size_are_the_same(tmp_path: Path) -> None:
    one, other = save(tmp_path / "one", 1, world_size=2), save(tmp_path / "other", 1, world_size=5)
    with Checkpoint.open(one) as first, Checkpoint.open(other) as second:
        found = compare(first, second)
    assert found.same_values
    assert found.facts == {"world_size": (2, 5)}
    assert found.compared > 0


def test_differences_are_named_and_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compare_module, "CHUNK", 64)
    ours, theirs = normal(200), normal(200)
    theirs[[3, 150]] += np.float32(0.5)
    same = normal(50, 1)
    first = write(tmp_path / "a", {("w", "master"): ours, ("same", "master"): same})
    second = write(tmp_path / "b", {("w", "master"): theirs, ("same", "master"): same}, ranks=2, seed=9)
    with Checkpoint.open(first) as a, Checkpoint.open(second) as b:
        found = compare(a, b)
    (difference,) = found.differences
    assert (difference.tensor, difference.differing, difference.elements) == ("w", 2, 200)
    assert difference.largest == pytest.approx(0.5, rel=1e-6)
    apart = theirs.astype(np.float64) - ours
    expected = np.linalg.norm(apart) / np.linalg.norm(ours.astype(np.float64))
    assert difference.relative == pytest.approx(expected)
    assert found.buffers == ("bias",)
    assert found.facts == {"world_size": (1, 2), "cursor.seed": (0, 9)}
    assert not found.same_values


def test_signed_zeros_and_nans_differ_by_their_bits(tmp_path: Path) -> None:
    first = write(tmp_path / "a", {("w", "master"): np.array([0.0, np.nan, 1.0], np.float32)})
    second = write(tmp_path / "b", {("w", "master"): np.array([-0.0, np.nan, np.nan], np.float32)})
    with Checkpoint.open(first) as a, Checkpoint.open(second) as b:
        (difference,) = compare(a, b).differences
    assert difference.differing == 2
    assert math.isnan(difference.largest)


def test_what_only_one_of_them_has_is_listed(tmp_path: Path) -> None:
    w, v = normal(10), normal(20)
    first = write(tmp_path / "a", {("w", "master"): w, ("w", "momentum"): w, ("only", "master"): v})
    second = write(tmp_path / "b", {("w", "master"): w, ("w", "exp_avg"): w})
    with Checkpoint.open(first) as a, Checkpoint.open(second) as b:
        found = compare(a, b)
    assert found.only_first == ("w:momentum F32 [10]", "only:master F32 [20]")
    assert found.only_second == ("w:exp_avg F32 [10]",)
    assert not found.same_values


def test_comparing_checks_what_it_reads(tmp_path: Path) -> None:
    first, second = save(tmp_path / "a", 1), save(tmp_path / "b", 1)
    shard = second / "shard-00001-of-00002.safetensors"
    flip(shard, 8 * (shard.stat().st_size - 1))
    with Checkpoint.open(first) as a, Checkpoint.open(second) as b, pytest.raises(Damaged):
        compare(a, b)
