"""No byte of a checkpoint can change unnoticed."""

from __future__ import annotations

import json
import os
import random
import zlib
from pathlib import Path

import numpy as np
import pytest

from tests.checkpoint_tools.saves import assert_holds, read_everything, save, values
from zslurm.checkpoint_tools import (
    Checkpoint,
    CheckpointError,
    Damaged,
    Incomplete,
    NotACheckpoint,
    Tensor,
    VersionTooNew,
    list_checkpoints,
)
from zslurm.checkpoint_tools.format import shard_header

SHARD = "shard-00001-of-00002.safetensors"


def flip(path: Path, bit: int) -> None:
    data = bytearray(path.read_bytes())
    data[bit // 8] ^= 1 << bit % 8
    path.write_bytes(data)


def assert_every_flip_is_found(root: Path, file: str, count: int) -> None:
    path = save(root, 1)
    target = path / file
    bits = random.Random(20240917).sample(range(target.stat().st_size * 8), count)
    for bit in bits:
        flip(target, bit)
        with pytest.raises(CheckpointError) as caught:
            read_everything(path)
        assert isinstance(caught.value, Damaged), f"bit {bit}: {caught.value!r}"
        assert caught.value.file == path / file
        flip(target, bit)
    assert_holds(path, 1)


@pytest.mark.parametrize("file", ["manifest.json", SHARD])
def test_a_flipped_bit_is_found(tmp_path: Path, file: str) -> None:
    assert_every_flip_is_found(tmp_path, file, 60)


@pytest.mark.soak
@pytest.mark.parametrize("file", ["manifest.json", SHARD])
def test_a_thousand_flipped_bits_are_found(tmp_path: Path, file: str) -> None:
    assert_every_flip_is_found(tmp_path, file, 1000)


def test_damage_is_named_by_file_tensor_and_block(tmp_path: Path) -> None:
    path = save(tmp_path, 1, [Tensor("w", (1024,), {"master": "F32"})], world_size=2)
    flip(path / SHARD, 8 * 1030)
    out = np.empty(1024, np.float32)
    with Checkpoint.open(path) as checkpoint:
        checkpoint.read("w", "master", 0, 512, out[:512])  # rank 0's half is whole
        with pytest.raises(Damaged, match=r"block 4 \(bytes 1024 to 1280\).*'w'.*older checkpoint") as caught:
            checkpoint.read("w", "master", 0, 1024, out)
    assert (caught.value.file, caught.value.tensor, caught.value.block) == (path / SHARD, "w", 4)


def test_undamaged_parts_of_a_damaged_file_can_be_read(tmp_path: Path) -> None:
    path = save(tmp_path, 1, [Tensor("w", (1024,), {"master": "F32"})], world_size=1)
    file = path / "shard-00000-of-00001.safetensors"
    flip(file, 8 * (file.stat().st_size - 1))
    with Checkpoint.open(path) as checkpoint:
        checkpoint.read("w", "master", 0, 256, np.empty(256, np.float32))


def test_bytes_of_a_damaged_block_are_never_served_later(tmp_path: Path) -> None:
    tensor = Tensor("w", (1024,), {"master": "F32"})
    path = save(tmp_path, 1, [tensor], world_size=1)
    file = path / "shard-00000-of-00001.safetensors"
    flip(file, 8 * (file.stat().st_size - 1))
    last = np.empty(1, np.float32)
    with Checkpoint.open(path) as checkpoint:
        for start in (500, 1023, 500, 1023, 500):  # each a part of a block: the cache is used
            if start == 1023:
                with pytest.raises(Damaged):
                    checkpoint.read("w", "master", start, start + 1, last)
            else:
                checkpoint.read("w", "master", start, start + 1, last)
                assert last.tobytes() == values(tensor, "master", 1)[start : start + 1].tobytes()


@pytest.mark.parametrize("file", ["manifest.json", SHARD])
@pytest.mark.parametrize("keep", [0.0, 0.5, 0.999])
def test_a_truncated_file_is_found_on_opening(tmp_path: Path, file: str, keep: float) -> None:
    path = save(tmp_path, 1)
    os.truncate(path / file, int((path / file).stat().st_size * keep))
    with pytest.raises(Damaged) as caught:
        Checkpoint.open(path)
    assert caught.value.file == path / file


def test_a_file_that_shrinks_while_it_is_open_is_found(tmp_path: Path) -> None:
    path = save(tmp_path, 1, [Tensor("w", (1024,), {"master": "F32"})], world_size=1)
    with Checkpoint.open(path) as checkpoint:
        checkpoint.read("w", "master", 0, 1, np.empty(1, np.float32))
        os.truncate(path / "shard-00000-of-00001.safetensors", 2048)
        with pytest.raises(Damaged, match="it ends after 2048 bytes"):
            checkpoint.read("w", "master", 0, 1024, np.empty(1024, np.float32))


def test_a_missing_shard_is_found_on_opening(tmp_path: Path) -> None:
    path = save(tmp_path, 1)
    (path / SHARD).unlink()
    with pytest.raises(Damaged, match=f"{SHARD} is damaged: the file is missing"):
        Checkpoint.open(path)


def test_a_missing_shard_is_found_on_reading_if_opening_did_not_look(tmp_path: Path) -> None:
    path = save(tmp_path, 1)
    (path / SHARD).unlink()
    with Checkpoint.open(path, check_files=False) as checkpoint, pytest.raises(Damaged, match="is missing"):
        checkpoint.read("layers.0.norm.scale", "master", 0, 7, np.empty(7, np.float32))


def test_a_pipe_in_place_of_a_shard_does_not_block(tmp_path: Path) -> None:
    path = save(tmp_path, 1)
    (path / SHARD).unlink()
    os.mkfifo(path / SHARD)
    with pytest.raises(Damaged, match="not a regular file"):
        Checkpoint.open(path)
    with Checkpoint.open(path, check_files=False) as checkpoint, pytest.raises(Damaged, match="not a regular"):
        checkpoint.read("layers.0.norm.scale", "master", 0, 7, np.empty(7, np.float32))


def test_two_shards_in_each_other_s_place_are_found(tmp_path: Path) -> None:
    path = save(tmp_path, 1, [Tensor("w", (128,), {"master": "F32"})], world_size=3)
    one, other = path / "shard-00001-of-00003.safetensors", path / "shard-00002-of-00003.safetensors"
    os.truncate(other, one.stat().st_size)  # so that sizes do not tell; nothing reads the tail
    one_bytes, other_bytes = one.read_bytes(), other.read_bytes()
    one.write_bytes(other_bytes)
    other.write_bytes(one_bytes)
    with Checkpoint.open(path, check_files=False) as checkpoint, pytest.raises(Damaged):
        checkpoint.read("w", "master", 0, 128, np.empty(128, np.float32))


def test_the_shard_of_another_checkpoint_is_found(tmp_path: Path) -> None:
    path, other = save(tmp_path, 1), save(tmp_path, 2)
    (path / SHARD).write_bytes((other / SHARD).read_bytes())
    with pytest.raises(Damaged):
        read_everything(path)


def rewrite_manifest(path: Path, old: bytes, new: bytes) -> None:
    """Change a manifest and give it a checksum that fits, as another program might have written it."""
    body = (path / "manifest.json").read_bytes().rpartition(b',\n"crc32"')[0]
    assert old in body
    body = body.replace(old, new, 1)
    (path / "manifest.json").write_bytes(body + b',\n"crc32":"%08x"\n}\n' % zlib.crc32(body))


def test_a_newer_version_is_refused_with_advice(tmp_path: Path) -> None:
    path = save(tmp_path, 1)
    rewrite_manifest(path, b'"version":1', b'"version":2')
    with pytest.raises(VersionTooNew, match=r"format version 2, .* up to 1; upgrade zslurm"):
        Checkpoint.open(path)
    (listing,) = list_checkpoints(tmp_path)
    assert listing.reason is not None and "upgrade" in listing.reason


def test_a_manifest_of_another_format_is_no_checkpoint(tmp_path: Path) -> None:
    path = save(tmp_path, 1)
    rewrite_manifest(path, b'"zslurm-checkpoint"', b'"cookbook"')
    with pytest.raises(NotACheckpoint, match="cookbook"):
        Checkpoint.open(path)


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        (b'"step":1', b'"step":"one"', 'expected a whole number, got "one"'),
        (b'"step":1', b'"stop":1', "step"),
        (b'"model":{', b'"model":[],"m":{', "expected an object"),
        (b'[0,"master",0,64,0,', b'[-1,"master",0,64,0,', "expected a whole number, got -1"),
        (b'[0,"master",0,64,0,', b'[99,"master",0,64,0,', "not of the expected form"),
    ],
)
def test_a_manifest_that_makes_no_sense_is_damaged(tmp_path: Path, old: bytes, new: bytes, message: str) -> None:
    path = save(tmp_path, 1, [Tensor("w", (128,), {"master": "F32"})])
    rewrite_manifest(path, old, new)
    with pytest.raises(Damaged, match=message):
        Checkpoint.open(path)


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        (b'"shape":[128]', b'"shape":[' + b"2," * 10**5 + b"1]", "a shape has 100001 dimensions, and at most 64"),
        (b'"block_size":256', b'"block_size":%d' % (1 << 62), "a block must have 1 to 1073741824 bytes"),
        (b'"shape":[128]', b'"shape":[4611686018427387904]', "the shards hold 128 elements"),
        (b'"shape":[3]', b'"shape":[4611686018427387904]', r"and what it is said to hold has \d+"),
    ],
)
def test_an_absurd_manifest_is_one_error(tmp_path: Path, old: bytes, new: bytes, message: str) -> None:
    """No memory is reserved by it: all of a tensor and of a buffer must fit into the files that are there."""
    path = save(tmp_path, 1, [Tensor("w", (128,), {"master": "F32"})])
    rewrite_manifest(path, old, new)
    with pytest.raises(CheckpointError, match=message):
        Checkpoint.open(path)


def test_extents_must_fit_into_their_files(tmp_path: Path) -> None:
    """A reader reserves memory for a whole tensor before it reads the first byte."""
    path = save(tmp_path, 1, [Tensor("w", (128,), {"master": "F32"})])
    rewrite_manifest(path, b'"shape":[128]', b'"shape":[1000000064]')
    rewrite_manifest(path, b",64,128,1,", b",64,1000000064,1,")
    with pytest.raises(Incomplete, match=f"{SHARD} has .* bytes, and what it is said to hold has 4"):
        Checkpoint.open(path)


@pytest.mark.parametrize("target", ["/dev/zero", "/dev/full", "a pipe", "a directory"])
def test_a_manifest_without_an_end_is_one_error(tmp_path: Path, target: str) -> None:
    path = save(tmp_path, 1)
    manifest = path / "manifest.json"
    manifest.unlink()
    if target == "a pipe":
        os.mkfifo(manifest)
    elif target == "a directory":
        manifest.mkdir()
    else:
        manifest.symlink_to(target)
    with pytest.raises(CheckpointError, match=r"not a regular file|Is a directory"):
        Checkpoint.open(path)
    (listing,) = list_checkpoints(tmp_path)
    assert not listing.complete


def test_a_huge_manifest_is_not_read(tmp_path: Path) -> None:
    path = save(tmp_path, 1)
    os.truncate(path / "manifest.json", 1 << 40)
    with pytest.raises(Damaged, match=r"it has 1\.00 TiB, and a manifest has at most 128 MiB"):
        Checkpoint.open(path)


def test_a_huge_header_is_not_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = save(tmp_path, 1)
    monkeypatch.setattr(shard_header, "MOST_BYTES", 10)
    with (
        Checkpoint.open(path) as checkpoint,
        pytest.raises(Damaged, match=r"its header has \d+ bytes, more than any"),
    ):
        checkpoint.read("layers.0.norm.scale", "master", 0, 7, np.empty(7, np.float32))


def test_a_manifest_cannot_name_files_elsewhere(tmp_path: Path) -> None:
    path = save(tmp_path, 1)
    rewrite_manifest(path, json.dumps(SHARD).encode(), b'"../../secret"')
    with pytest.raises(Incomplete, match="not a plain file name"):
        Checkpoint.open(path)


def test_a_header_that_disagrees_with_the_manifest_is_found(tmp_path: Path) -> None:
    path = save(tmp_path, 1, [Tensor("w", (128,), {"master": "F32"})])
    rewrite_manifest(path, b'"w:master[64:128]"', b'"w:master[0:64]"')
    with Checkpoint.open(path) as checkpoint, pytest.raises(Damaged, match="header does not hold 64 F32"):
        checkpoint.read("w", "master", 64, 128, np.empty(64, np.float32))
