"""Shards: readable by others, written in full or not at all."""

from __future__ import annotations

import json
import os
import resource
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
from safetensors import safe_open
from safetensors.numpy import load_file

from tests.checkpoint_tools.saves import BUFFERS, TENSORS, assert_holds, save, values
from zslurm.checkpoint_tools import (
    BufferEntry,
    Checkpoint,
    Entry,
    Mismatch,
    NoSpace,
    Tensor,
    WriteFailed,
    assemble,
    begin,
    commit,
    list_checkpoints,
    write_shard,
)
from zslurm.checkpoint_tools.format.shard_header import DATA_ALIGNMENT, DTYPES


def test_the_safetensors_library_reads_a_shard(tmp_path: Path) -> None:
    tensor = TENSORS[1]
    path = save(tmp_path, 3, [tensor], world_size=2)
    found = {}
    for shard in sorted(path.glob("*.safetensors")):
        found.update(load_file(shard))
    for state in tensor.states:
        matrices = [found[f"{tensor.name}:{state}[{start}:{start + 55}]"] for start in (0, 55, 110)]
        assert np.concatenate(matrices).tobytes() == values(tensor, state, 3).tobytes()
    for name, array in BUFFERS.items():
        np.testing.assert_array_equal(found[name], array)
        assert found[name].shape == array.shape


def test_every_dtype_and_shape_comes_back(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    directory = begin(tmp_path, 1, "n")
    arrays = {}
    for name, dtype in DTYPES.items():
        for shape in [(), (0, 3), (5, 3)]:
            bits = rng.integers(0, 2, int(np.prod(shape)) * dtype.itemsize, dtype=np.uint8)
            arrays[f"{name}{shape}"] = (name, bits.view(dtype).reshape(shape))
    buffers = [BufferEntry(key, array, name) for key, (name, array) in arrays.items()]
    report = write_shard(directory, 0, 1, [], buffers, block_size=17)
    with safe_open(directory / report.file, "numpy") as file:
        for key, (name, array) in arrays.items():
            assert file.get_slice(key).get_dtype() == name
            assert tuple(file.get_slice(key).get_shape()) == array.shape
    manifest = assemble(
        [report], step=1, tokens=0, model={}, cursor={}, state={}, tensors=[], buffers=arrays.keys()
    )
    with Checkpoint.open(commit(tmp_path, directory, manifest)) as checkpoint:
        for key, (_, array) in arrays.items():
            found = checkpoint.read_buffer(key)
            assert (found.dtype, found.shape, found.tobytes()) == (array.dtype, array.shape, array.tobytes())


def test_a_whole_tensor_keeps_its_shape_for_other_readers(tmp_path: Path) -> None:
    weight = np.arange(6, dtype=np.float32).reshape(2, 3)
    report = write_shard(tmp_path, 0, 1, [Entry("w", "master", 0, 6, weight)])
    np.testing.assert_array_equal(load_file(tmp_path / report.file)["w:master[0:6]"], weight)


def test_arrays_are_aligned_to_their_elements(tmp_path: Path) -> None:
    buffers = [
        BufferEntry("odd", np.zeros(3, np.uint8)),
        BufferEntry("wide", np.zeros(3, np.float64)),
        BufferEntry("half", np.zeros(3, np.float16)),
    ]
    report = write_shard(tmp_path, 0, 1, [], buffers)
    data = (tmp_path / report.file).read_bytes()
    length = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + length])
    assert (8 + length) % DATA_ALIGNMENT == 0
    assert header["wide"]["data_offsets"][0] % 8 == header["half"]["data_offsets"][0] % 2 == 0


def test_a_rank_that_owns_nothing_writes_an_empty_shard(tmp_path: Path) -> None:
    report = write_shard(tmp_path, 2, 3, [])
    assert load_file(tmp_path / report.file) == {}
    assert not report.extents and not report.buffers


def test_thousands_of_small_tensors_take_few_system_calls(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = 0
    writev = os.writev

    def counting(descriptor: int, pieces: list[memoryview]) -> int:
        nonlocal calls
        calls += 1
        return writev(descriptor, pieces)

    monkeypatch.setattr(os, "writev", counting)
    tensors = [Tensor(f"layers.{i}.scale", (33,), {"master": "F32"}) for i in range(4000)]
    path = save(tmp_path, 1, tensors, world_size=2, block_size=4 << 20)
    assert calls < 10
    assert_holds(path, 1, tensors)


def test_short_writes_lose_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rng = np.random.default_rng(1)
    writev = os.writev

    def short(descriptor: int, pieces: list[memoryview]) -> int:
        wanted = int(rng.integers(1, 40))
        taken = []
        for piece in pieces:
            taken.append(piece[:wanted])
            wanted -= len(taken[-1])
            if wanted == 0:
                break
        return writev(descriptor, taken)

    monkeypatch.setattr(os, "writev", short)
    assert_holds(save(tmp_path, 1), 1)


@contextmanager
def one_kilobyte_files() -> Iterator[None]:
    """No file can grow beyond 1 KiB: the system takes a part of a write, then refuses with EFBIG.

    For as short as can be: pytest's own output may be a file.
    """
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1024, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        signal.signal(signal.SIGXFSZ, handler)


def test_a_shard_that_hits_the_file_size_limit_is_removed(tmp_path: Path) -> None:
    entry = Entry("w", "master", 0, 4096, np.ones(4096, np.float32))
    refused = pytest.raises(
        WriteFailed, match=r"shard-00000-of-00001.*earlier checkpoints are untouched: raise `ulimit -f`"
    )
    with refused as raised, one_kilobyte_files():
        write_shard(tmp_path, 0, 1, [entry])
    assert not isinstance(raised.value, NoSpace), "saves would be paused for ever: the disk has space"
    assert list(tmp_path.iterdir()) == []


FULL_DISK = """
import sys
from pathlib import Path
import numpy as np
from zslurm.checkpoint_tools import Entry, NoSpace, begin, write_shard

root = Path(sys.argv[1])
directory = begin(root / "checkpoints", 1, "n")
before = sum(1 for _ in directory.iterdir())
try:
    write_shard(directory, 0, 1, [Entry("w", "master", 0, 1 << 20, np.ones(1 << 20, np.float32))])
except NoSpace as error:
    assert "No space left on device" in str(error), error
    assert list(directory.iterdir()) == []
    print("refused")
"""

READ_ONLY = """
import sys
from pathlib import Path
from zslurm.checkpoint_tools import NoSpace, WriteFailed, begin, list_checkpoints

root = Path(sys.argv[1])
try:
    begin(root / "checkpoints", 1, "n")
except WriteFailed as error:
    assert not isinstance(error, NoSpace) and "Read-only file system" in str(error), error
    assert list_checkpoints(root) == []
    print("refused")
"""


@pytest.mark.parametrize(
    ("options", "program"), [("size=1m", FULL_DISK), ("ro", READ_ONLY)], ids=["full", "read-only"]
)
def test_a_real_file_system_that_refuses_is_named(tmp_path: Path, options: str, program: str) -> None:
    """On a tmpfs of its own, in a mount namespace of its own: root is refused like anyone."""
    unshare = shutil.which("unshare")
    namespace = [unshare or "unshare", "--map-root-user", "--mount"]
    mount = f'mount -t tmpfs -o {options} tmpfs "$0"'
    if not unshare or subprocess.run([*namespace, "sh", "-c", mount, tmp_path], capture_output=True).returncode:
        pytest.skip("this machine lets nobody mount a tmpfs in a namespace of their own")
    done = subprocess.run(
        [*namespace, "sh", "-c", mount + ' && exec "$1" -c "$2" "$0"', tmp_path, sys.executable, program],
        capture_output=True,
        text=True,
    )
    assert done.stdout == "refused\n", done.stderr


def test_a_root_that_cannot_be_made_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(WriteFailed, match=r"cannot write .*file/checkpoints: Not a directory"):
        begin(tmp_path / "file" / "checkpoints", 1, "n")


def test_a_save_that_cannot_be_written_leaves_the_earlier_checkpoint_alone(tmp_path: Path) -> None:
    path = save(tmp_path, 1)
    with pytest.raises(WriteFailed), one_kilobyte_files():
        save(tmp_path, 2, [Tensor("w", (4096,), {"master": "F32"})])
    assert [listing.path for listing in list_checkpoints(tmp_path)] == [path]
    assert_holds(path, 1)


def test_two_writers_never_share_a_shard(tmp_path: Path) -> None:
    write_shard(tmp_path, 0, 1, [])
    with pytest.raises(WriteFailed, match="File exists"):
        write_shard(tmp_path, 0, 1, [])
    assert (tmp_path / "shard-00000-of-00001.safetensors").exists()


FLOATS = np.ones(4, np.float32)


@pytest.mark.parametrize(
    ("entry", "message"),
    [
        (Entry("w", "master", 0, 5, FLOATS), r"'w', state 'master': got 4 elements for the range \[0, 5\)"),
        (Entry("w", "master", 4, 0, FLOATS), r"range \[4, 0\)"),
        (Entry("w", "master", 3, 3, FLOATS[:0]), r"range \[3, 3\)"),
        (Entry("w", "master", 0, 2, FLOATS[::2]), "not C-contiguous"),
        (Entry("w", "master", 0, 4, FLOATS, "BF16"), "BF16 is carried by numpy '<u2', got '<f4'"),
        (Entry("w", "master", 0, 4, FLOATS, "Q4"), "dtype 'Q4' cannot be stored"),
        (Entry("w", "master", 0, 4, FLOATS.astype(">f4")), "'>f4' cannot be stored"),
        (Entry("w", "master", 0, 4, FLOATS.astype(complex)), "'<c16' cannot be stored"),
    ],
)
def test_an_array_that_does_not_fit_is_refused_before_anything_is_written(
    tmp_path: Path, entry: Entry, message: str
) -> None:
    with pytest.raises(Mismatch, match=message):
        write_shard(tmp_path, 0, 1, [entry])
    assert list(tmp_path.iterdir()) == []


def test_an_extent_cannot_be_given_twice(tmp_path: Path) -> None:
    entry = Entry("w", "master", 0, 4, FLOATS)
    with pytest.raises(Mismatch, match="same name"):
        write_shard(tmp_path, 0, 1, [entry, entry])


def test_a_rank_must_be_of_the_world(tmp_path: Path) -> None:
    with pytest.raises(Mismatch, match=r"rank must be in \[0, 2\)"):
        write_shard(tmp_path, 2, 2, [])
