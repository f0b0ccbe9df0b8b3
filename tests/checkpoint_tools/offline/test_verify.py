"""`verify` finds all damage, wherever it is, and names the file, block and tensor."""

from __future__ import annotations

import os
import random
from pathlib import Path

import pytest

from tests.checkpoint_tools.saves import save
from tests.checkpoint_tools.test_damage import flip, rewrite_manifest
from zslurm.checkpoint_tools import NotACheckpoint, Tensor, VersionTooNew, verify

FIRST, SECOND = "shard-00000-of-00002.safetensors", "shard-00001-of-00002.safetensors"


def test_a_whole_checkpoint_is_sound_and_every_byte_was_read(tmp_path: Path) -> None:
    path = save(tmp_path, 1)
    seen: list[tuple[int, int]] = []
    found = verify(path, report=lambda done, total: seen.append((done, total)))
    assert found.sound
    assert found.files == 3
    assert found.bytes == sum(file.stat().st_size for file in path.iterdir())
    assert seen[-1] == (found.bytes, found.bytes)
    assert seen == sorted(seen)


def assert_every_flip_is_found(root: Path, count: int) -> None:
    path = save(root, 1)
    files = sorted(path.iterdir())
    places = [(file, bit) for file in files for bit in range(file.stat().st_size * 8)]
    for file, bit in random.Random(20261121).sample(places, count):
        flip(file, bit)
        damages = verify(path).damages
        assert [damage.file for damage in damages] == [file.name], f"bit {bit} of {file.name}"
        assert file.name == "manifest.json" or damages[0].block == bit // 8 // 256
        flip(file, bit)
    assert verify(path).sound


def test_a_flipped_bit_anywhere_is_found(tmp_path: Path) -> None:
    assert_every_flip_is_found(tmp_path, 100)


@pytest.mark.soak
def test_a_thousand_flipped_bits_anywhere_are_found(tmp_path: Path) -> None:
    assert_every_flip_is_found(tmp_path, 1000)


def test_all_damage_is_found_not_only_the_first(tmp_path: Path) -> None:
    path = save(tmp_path, 1, [Tensor("w", (1024,), {"master": "F32"}), Tensor("v", (64,), {"master": "F32"})])
    flip(path / FIRST, 8 * 600)
    flip(path / SECOND, 8 * 1100)
    flip(path / SECOND, 8 * 2000)
    damages = verify(path, threads=3).damages
    assert [(damage.file, damage.block) for damage in damages] == [(FIRST, 2), (SECOND, 4), (SECOND, 7)]
    assert all(damage.tensors for damage in damages)
    assert damages[0].tensors == ("w:master[0:544]",)


def test_a_damaged_header_is_found_and_hides_the_tensors_names(tmp_path: Path) -> None:
    path = save(tmp_path, 1, [Tensor("w", (1024,), {"master": "F32"})])
    flip(path / FIRST, 8 * 20)
    flip(path / FIRST, 8 * 1500)
    damages = verify(path).damages
    assert [(damage.block, damage.tensors) for damage in damages] == [(0, ()), (5, ())]


def test_truncated_missing_and_foreign_files_are_all_named(tmp_path: Path) -> None:
    path = save(tmp_path, 1, world_size=3)
    first, second, third = sorted(path.glob("shard-*"))
    os.truncate(first, first.stat().st_size - 1)
    second.unlink()
    third.unlink()
    os.mkfifo(third)
    reasons = {damage.file: damage.reason for damage in verify(path).damages}
    assert list(reasons) == [first.name, second.name, third.name]
    assert "bytes instead of" in reasons[first.name]
    assert reasons[second.name] == "the file is missing"
    assert reasons[third.name] == "it is not a regular file"


def test_two_shards_in_each_other_s_place_are_found(tmp_path: Path) -> None:
    path = save(tmp_path, 1, [Tensor("w", (128,), {"master": "F32"})], world_size=3)
    one, other = path / "shard-00001-of-00003.safetensors", path / "shard-00002-of-00003.safetensors"
    one_bytes, other_bytes = one.read_bytes(), other.read_bytes()
    one.write_bytes(other_bytes)
    other.write_bytes(one_bytes)
    assert {damage.file for damage in verify(path).damages} == {one.name, other.name}


def test_a_manifest_edited_by_hand_is_damaged(tmp_path: Path) -> None:
    path = save(tmp_path, 1)
    text = (path / "manifest.json").read_text()
    (path / "manifest.json").write_text(text.replace('"step":1', '"step":2'))
    (damage,) = verify(path).damages
    assert (damage.file, damage.reason) == ("manifest.json", "its own checksum does not match")


def test_what_is_no_checkpoint_is_refused(tmp_path: Path) -> None:
    with pytest.raises(NotACheckpoint, match=r"no manifest\.json"):
        verify(tmp_path)
    path = save(tmp_path, 1)
    rewrite_manifest(path, b'"version":1', b'"version":99')
    with pytest.raises(VersionTooNew, match="upgrade"):
        verify(path)
