"""Every bad bundle is one clear line that names the file and what to do."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import h5py
import numpy as np
import pytest

from tests.train.data.corpora import HEADER, write_bundle
from zslurm.train.data.bundle import Bundle, Corpus
from zslurm.train.data.hdf5 import locate
from zslurm.train.data.schema import BundleHeader, bundle_name
from zslurm.train.data.verify import verify
from zslurm.train.errors import DataError


@pytest.fixture
def good(tmp_path: Path) -> Path:
    return write_bundle(tmp_path / "tokens.h5", [[*range(2, 200), 1]] * 20)


def complaint(path: Path) -> str:
    with pytest.raises(DataError) as caught:
        Corpus.open(path)
    message = str(caught.value)
    assert "\n" not in message
    assert message.startswith(str(path))
    assert ";" in message, "what to do"
    return message


def edit(path: Path, change: Callable[[h5py.File], object]) -> Path:
    with h5py.File(path, "r+") as file:
        change(file)
    return path


def rewrite_tokens(**options: object) -> Callable[[h5py.File], object]:
    def change(file: h5py.File) -> None:
        tokens = file["tokens"][:]
        del file["tokens"]
        file.create_dataset("tokens", data=tokens, **options)

    return change


def test_a_missing_file(tmp_path: Path) -> None:
    assert "no such file" in complaint(tmp_path / "none.h5")
    assert "zslurm data build" in complaint(tmp_path / "none.h5")


def test_an_empty_directory(tmp_path: Path) -> None:
    assert "holds no tokens-NNNNN-of-NNNNN.h5" in complaint(tmp_path)


def test_an_empty_file(tmp_path: Path) -> None:
    (tmp_path / "tokens.h5").touch()
    assert "zero bytes" in complaint(tmp_path / "tokens.h5")


def test_a_file_that_is_not_hdf5(tmp_path: Path) -> None:
    (tmp_path / "tokens.h5").write_text("PAR1, or anything else")
    assert "not an HDF5 file" in complaint(tmp_path / "tokens.h5")


def test_an_hdf5_file_of_something_else(tmp_path: Path) -> None:
    with h5py.File(tmp_path / "tokens.h5", "w") as file:
        file["weights"] = np.zeros(10)
    assert "not a token bundle" in complaint(tmp_path / "tokens.h5")


def test_a_truncated_file(good: Path) -> None:
    content = good.read_bytes()
    good.write_bytes(content[:-1])
    assert "truncated" in complaint(good)
    for length in range(1, len(content), 97):
        good.write_bytes(content[:length])
        complaint(good)


def test_a_file_that_shrinks_while_it_is_opened(good: Path) -> None:
    with h5py.File(good) as file:
        os.truncate(good, 3000)
        with pytest.raises(DataError, match=r"truncated: tokens needs \d+ bytes, the file has 3000"):
            locate(good, file, "tokens")


def test_a_flipped_bit_anywhere_is_reported_or_harmless(good: Path) -> None:
    """HDF5 without metadata checksums hangs or crashes on some of these."""
    content, pristine = good.read_bytes(), Bundle.open(good)
    for offset in range(0, len(content), 37):
        flipped = bytearray(content)
        flipped[offset] ^= 1 << offset % 8
        good.write_bytes(flipped)
        try:
            bundle = Bundle.open(good)
        except DataError as error:
            assert str(error).startswith(f"{good}: ")
            continue
        if not verify(good, 1).damages:
            assert bundle.header == pristine.header
            assert bundle.tokens.tolist() == pristine.tokens.tolist()
            assert bundle.documents.tolist() == pristine.documents.tolist()


def test_a_newer_version(good: Path) -> None:
    message = complaint(edit(good, lambda file: file.attrs.modify("version", 3)))
    assert "version 3, newer than the 2" in message
    assert "upgrade zslurm" in message


def test_a_version_that_never_was(good: Path) -> None:
    assert "never existed" in complaint(edit(good, lambda file: file.attrs.modify("version", 0)))


def test_a_chunked_dataset(good: Path) -> None:
    assert "stored in chunks" in complaint(edit(good, rewrite_tokens(chunks=(64,))))


@pytest.mark.parametrize("name", ["tokens", "documents", "checksums"])
def test_a_missing_dataset(good: Path, name: str) -> None:
    assert name in complaint(edit(good, lambda file: file.pop(name)))


@pytest.mark.parametrize("name", ["version", "vocab_size", "tokenizer_sha256", "end_token", "tokens"])
def test_a_missing_attribute(good: Path, name: str) -> None:
    assert name in complaint(edit(good, lambda file: file.attrs.pop(name)))


def test_datasets_that_contradict_the_header(good: Path) -> None:
    assert "promises" in complaint(edit(good, lambda file: file.attrs.modify("tokens", 7)))
    edit(good, lambda file: file.attrs.modify("tokens", 20 * 199))
    assert "where the header promises" in complaint(edit(good, rewrite_tokens(dtype="<u4")))


def test_ids_beyond_the_vocabulary(good: Path) -> None:
    edit(good, lambda file: file["tokens"].__setitem__(37, 999))
    corpus = Corpus.open(good)
    assert corpus.window(3, 16).shape == (17,)
    with pytest.raises(DataError, match=r"tokens\.h5: token 37 has id 999, but the vocabulary has 300"):
        corpus.window(2, 16)


@pytest.mark.parametrize(
    "other",
    [
        replace(HEADER, tokenizer_sha256="cd" * 32),
        replace(HEADER, vocab_size=301),
        replace(HEADER, end_token=0),
    ],
)
def test_bundles_of_two_tokenizers(tmp_path: Path, other: BundleHeader) -> None:
    write_bundle(tmp_path / bundle_name(0, 2), [[4, 1]])
    write_bundle(tmp_path / bundle_name(1, 2), [[4, 1]], other)
    message = complaint(tmp_path)
    assert bundle_name(1, 2) in message
    assert "another tokenizer" in message


def test_a_missing_bundle(tmp_path: Path) -> None:
    for part in (0, 2):
        write_bundle(tmp_path / bundle_name(part, 3), [[4, 1]])
    assert "tokens-00001-of-00003.h5 is missing (1 of 3 bundles is)" in complaint(tmp_path)


def test_two_corpora_in_one_directory(tmp_path: Path) -> None:
    write_bundle(tmp_path / bundle_name(0, 1), [[4, 1]])
    shutil.copy(tmp_path / bundle_name(0, 1), tmp_path / bundle_name(0, 2))
    assert "mixes corpora of 1 and 2 bundles" in complaint(tmp_path)


def test_a_vocabulary_larger_than_the_models(good: Path) -> None:
    corpus = Corpus.open(good)
    corpus.check_fits(300)
    with pytest.raises(DataError, match=r"vocabulary of 300 tokens, more than the model's 299; set model"):
        corpus.check_fits(299)


def test_less_than_one_sequence(tmp_path: Path) -> None:
    corpus = Corpus.open(write_bundle(tmp_path / "tokens.h5", [[4, 5, 6, 1]]))
    assert corpus.sequences(3) == 1
    with pytest.raises(DataError, match="holds 4 tokens, but one sequence of context 4 needs 5"):
        corpus.sequences(4)
