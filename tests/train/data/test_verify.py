"""Verification reads everything and names what is damaged: the bundle, the dataset, the block."""

from __future__ import annotations

import json
import os
import random
import shutil
from pathlib import Path

import h5py
import numpy as np
import pytest

from tests.train.data.corpora import HEADER, write_bundle, write_rows
from zslurm.train.data.build import bundle_writer as writer_module
from zslurm.train.data.build.build import build
from zslurm.train.data.build.bundle_writer import BundleWriter
from zslurm.train.data.build.source_reader import Fields
from zslurm.train.data.bundle import Bundle
from zslurm.train.data.schema import BLOCK_TOKENS, bundle_name
from zslurm.train.data.verify import BundleVerification, verify
from zslurm.train.errors import DataError


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A corpus of several bundles with masks, in blocks of 64 tokens."""
    directory = tmp_path_factory.mktemp("built")
    rows = [{"prompt": f"what is {i} plus {i}?", "completion": f" It is {i + i}, of course."} for i in range(40)]
    source = write_rows(directory / "pairs.jsonl", rows)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(writer_module, "BLOCK_TOKENS", 64)
        fields = Fields(prompt_key="prompt", completion_key="completion")
        build([source], directory / "out", vocab_size=280, fields=fields, bundle_bytes=1000)
    return directory / "out"


@pytest.fixture
def corpus(built: Path, tmp_path: Path) -> Path:
    shutil.copytree(built, tmp_path / "out")
    return tmp_path / "out"


def flip_bit(path: Path, offset: int, bit: int = 0) -> None:
    content = bytearray(path.read_bytes())
    content[offset] ^= 1 << bit
    path.write_bytes(content)


def reasons(path: Path) -> list[str]:
    """What is wrong; one line each, which names the file."""
    found = [damage.reason for damage in verify(path, 2).damages]
    assert all(reason.startswith(str(path)) and "\n" not in reason and ";" in reason for reason in found)
    return found


def test_an_intact_corpus_is_read_whole(corpus: Path) -> None:
    reported: list[tuple[int, int]] = []
    found = verify(corpus, 3, lambda done, total: reported.append((done, total)))
    tokens = sum(Bundle.open(path).token_count for path in corpus.glob("*.h5"))
    documents = sum(Bundle.open(path).document_count for path in corpus.glob("*.h5"))
    size = 3 * tokens + 8 * (documents + found.bundles)
    assert found.bundles > 2
    assert found == BundleVerification(found.bundles, tokens, size, ())
    assert reported[0] == (0, size)
    assert reported[-1] == (size, size)
    assert reported == sorted(reported)


def test_a_single_bundle_can_be_verified(corpus: Path) -> None:
    (corpus / "tokenizer.json").unlink()
    path = sorted(corpus.glob("*.h5"))[1]
    assert verify(path, 1).damages == ()
    flip_bit(path, Bundle.open(path).ranges["tokens"].offset)
    assert [damage.block for damage in verify(path, 1).damages] == [0]


def test_each_damaged_block_is_named(corpus: Path) -> None:
    first, second = sorted(corpus.glob("*.h5"))[:2]
    extents = Bundle.open(first).ranges
    flip_bit(first, extents["tokens"].offset + 2 * 70)
    flip_bit(first, extents["targets"].offset + 130)
    flip_bit(second, Bundle.open(second).ranges["documents"].offset + 9)
    damages = verify(corpus, 2).damages
    assert [(damage.path, damage.dataset, damage.block) for damage in damages] == [
        (first, "tokens", 1), (first, "targets", 2), (second, "documents", None),
    ]  # fmt: skip
    assert reasons(corpus) == [
        f"{first}: block 1 (tokens 64 to 127) is damaged: its CRC32 differs; "
        "copy it again or build the data again",
        f"{first}: block 2 (the mask of tokens 128 to 191) is damaged: its CRC32 differs; "
        "copy it again or build the data again",
        f"{second}: the document index is damaged: its CRC32 differs; copy it again or build the data again",
    ]


@pytest.mark.parametrize("sample", [20, pytest.param(10**6, marks=pytest.mark.soak)], ids=["sample", "all"])
def test_a_flipped_bit_is_found_or_changes_nothing(corpus: Path, sample: int) -> None:
    """Headers, index, checksums, mask and tokens; what is not found is between the datasets."""
    path = sorted(corpus.glob("*.h5"))[0]
    content, pristine = path.read_bytes(), Bundle.open(path)
    arrays = {name: extent.map(path).copy() for name, extent in pristine.ranges.items()}
    parts = {name: range(e.offset, e.offset + e.length * e.dtype.itemsize) for name, e in pristine.ranges.items()}
    elsewhere = [place for place in range(len(content)) if not any(place in part for part in parts.values())]
    generator = random.Random(0)
    for name, places in [*parts.items(), ("elsewhere", elsewhere)]:
        found = 0
        for place in generator.sample(list(places), min(sample, len(places))):
            flipped = bytearray(content)
            flipped[place] ^= 1 << generator.randrange(8)
            path.write_bytes(flipped)
            if verify(path, 1).damages:
                found += 1
                continue
            assert name == "elsewhere", f"a flipped bit of byte {place} in {name} was not found"
            bundle = Bundle.open(path)
            assert (bundle.header, bundle.ranges) == (pristine.header, pristine.ranges)
            for dataset, array in arrays.items():
                assert np.array_equal(bundle.ranges[dataset].map(path), array)
        assert found, f"nothing was found in {name}"


def test_truncation_is_found(corpus: Path) -> None:
    path = sorted(corpus.glob("*.h5"))[1]
    os.truncate(path, path.stat().st_size - 1)
    (reason,) = reasons(corpus)
    assert reason.startswith(f"{path}: is truncated")


def test_a_file_that_shrinks_while_it_is_read_is_reported(corpus: Path) -> None:
    """A mapping of it would kill the reader."""
    path = sorted(corpus.glob("*.h5"))[-1]
    offset = Bundle.open(path).ranges["targets"].offset

    def shrink(done: int, total: int) -> None:
        if not done:
            os.truncate(path, offset + 1)

    damages = verify(corpus, 1, shrink).damages
    assert damages
    assert {damage.path for damage in damages} == {path}
    assert "the file ends before its end" in damages[0].reason


def test_what_lies_beside_the_bundles_is_verified(corpus: Path) -> None:
    (corpus / "tokenizer.json").write_text("{}")
    assert "is not the tokenizer that made the bundles" in reasons(corpus)[0]
    (corpus / "tokenizer.json").unlink()
    assert "tokenizer.json: cannot be read: No such file" in reasons(corpus)[0]


def test_a_bundle_of_another_build_is_found(corpus: Path, built: Path) -> None:
    """Intact in itself, but not of this corpus: as when two copies were mixed."""
    first, second = sorted(corpus.glob("*.h5"))[:2]
    shutil.copy(first, second)
    assert reasons(corpus) == [
        f"{corpus}: build.json does not belong to these bundles, or is damaged; "
        "copy it again or build the data again"
    ]
    shutil.copy(built / second.name, second)
    record = json.loads((corpus / "build.json").read_text())
    (corpus / "build.json").write_text(json.dumps(record | {"documents": 7}))
    assert "build.json does not belong" in reasons(corpus)[0]
    (corpus / "build.json").unlink()
    assert reasons(corpus) == []


def test_a_missing_bundle_is_found(corpus: Path) -> None:
    first = sorted(corpus.glob("*.h5"))[0]
    first.unlink()
    assert f"{first.name} is missing" in reasons(corpus)[0]


def test_what_no_reader_could_use_is_found_though_its_checksums_hold(tmp_path: Path) -> None:
    """A bundle that another program wrote."""
    path = write_bundle(tmp_path / "tokens.h5", [[5, 6, 1], [7, 1]])
    with h5py.File(path, "r+") as file:
        file.attrs["vocab_size"] = 6
    assert "holds 7, where all are below 6" in reasons(path)[0]
    other = tmp_path / "other.h5"
    writer = BundleWriter(other, HEADER)
    writer.append(np.array([4, 5, 1]))
    writer._ends[0] = 1
    writer.commit()
    assert "does not divide the 3 tokens into documents" in reasons(other)[0]


def test_what_is_no_corpus_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="holds no tokens-NNNNN-of-NNNNN"):
        verify(tmp_path, 1)
    with pytest.raises(DataError, match="no such file"):
        verify(tmp_path / "none.h5", 1)
    (tmp_path / bundle_name(0, 1)).write_text("PAR1")
    assert "is not an HDF5 file" in reasons(tmp_path)[0]


def test_blocks_are_a_million_tokens() -> None:
    """Of 2 or 4 MiB: small enough to name the place, large enough to read fast."""
    assert BLOCK_TOKENS == 1 << 20
