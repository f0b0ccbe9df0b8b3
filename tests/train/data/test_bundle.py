"""A corpus is one memory-mapped stream of tokens, whatever bundles hold it."""

from __future__ import annotations

import fcntl
import hashlib
import os
import resource
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import h5py
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.train.data.corpora import HEADER, write_bundle
from zslurm.train.data.build.bundle_writer import BundleWriter, RollingWriter
from zslurm.train.data.build.inspect import unigram_entropy
from zslurm.train.data.bundle import Bundle, Corpus
from zslurm.train.data.schema import bundle_name
from zslurm.train.data.verify import verify
from zslurm.train.errors import DataError


def test_what_is_written_is_read(tmp_path: Path) -> None:
    path = write_bundle(tmp_path / "tokens.h5", [[5, 6, 1], [7, 1]])
    bundle = Bundle.open(path)
    assert bundle.header == HEADER
    assert bundle.tokens.tolist() == [5, 6, 1, 7, 1]
    assert bundle.documents.tolist() == [0, 3, 5]
    assert (bundle.token_count, bundle.document_count) == (5, 2)
    assert verify(path, 1).damages == ()


@pytest.mark.parametrize(("vocab_size", "dtype"), [(300, "<u2"), (65536, "<u2"), (65537, "<u4")])
def test_ids_take_the_narrowest_format(tmp_path: Path, vocab_size: int, dtype: str) -> None:
    header = replace(HEADER, vocab_size=vocab_size)
    path = write_bundle(tmp_path / "tokens.h5", [[vocab_size - 1, 0]], header)
    with h5py.File(path) as file:
        assert file["tokens"].dtype.str == dtype
        assert file["tokens"].chunks is None
    assert Bundle.open(path).read(0, 2).tolist() == [vocab_size - 1, 0]


@settings(max_examples=60, deadline=None)
@given(
    lengths=st.lists(st.integers(1, 9), min_size=1, max_size=12),
    limit=st.integers(1, 100),
    context=st.integers(1, 12),
)
def test_windows_do_not_depend_on_the_bundling(
    tmp_path_factory: pytest.TempPathFactory, lengths: list[int], limit: int, context: int
) -> None:
    directory = tmp_path_factory.mktemp("corpus")
    stream = np.arange(sum(lengths)) % HEADER.vocab_size
    documents = np.split(stream, np.cumsum(lengths)[:-1])
    with RollingWriter(directory, HEADER, limit) as writer:
        for document in documents:
            if not writer.has_room_for(document.size):
                writer.finish()
            writer.append(document)
        assert writer.commit() == len(list(directory.iterdir()))
    corpus = Corpus.open(directory)
    assert (corpus.token_count, corpus.document_count) == (len(stream), len(lengths))
    for bundle in corpus.bundles:
        assert 2 * bundle.token_count + 8 * bundle.document_count <= limit or bundle.document_count == 1
    count = (len(stream) - 1) // context
    for index in range(count):
        window = corpus.window(index, context)
        assert window.dtype == np.int64
        assert window.tolist() == stream[index * context : index * context + context + 1].tolist()
    if count:
        assert corpus.sequences(context) == count
        assert corpus.windows(range(count), context).shape == (count, context + 1)
    with pytest.raises(IndexError):
        corpus.window(count, context)


def test_a_file_is_a_corpus_too(tmp_path: Path) -> None:
    path = write_bundle(tmp_path / "any-name.h5", [[4, 5, 1]])
    assert Corpus.open(str(path)).window(0, 2).tolist() == [4, 5, 1]


def test_tokens_are_mapped_and_not_read(tmp_path: Path) -> None:
    """A sparse file of 64 GiB, more than the memory: only the pages of a window are touched."""
    tokens, block = 1 << 35, 1 << 30
    path = tmp_path / "tokens.h5"
    with h5py.File(path, "w") as file:
        properties = h5py.h5p.create(h5py.h5p.DATASET_CREATE)
        properties.set_alloc_time(h5py.h5d.ALLOC_TIME_EARLY)
        properties.set_fill_time(h5py.h5d.FILL_TIME_NEVER)
        space = h5py.h5s.create_simple((tokens,))
        h5py.h5d.create(file.id, b"tokens", h5py.h5t.STD_U16LE, space, properties).close()
        file["tokens"][tokens - 3 :] = [7, 8, 9]
        file.create_dataset("documents", data=np.array([0, tokens], "<u8")).attrs["crc32"] = 0
        checksums = file.create_dataset("checksums", data=np.zeros(tokens // block, "<u4"))
        checksums.attrs["block_tokens"] = block
        file.attrs.update(format="zslurm-tokens", version=1, vocab_size=300, end_token=1, source="")
        file.attrs.update(tokenizer_sha256="", tokens=tokens, documents=1)
    if path.stat().st_blocks * 512 > 1 << 30:
        pytest.skip("this file system has no sparse files")
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    corpus = Corpus.open(path)
    assert isinstance(corpus.bundles[0].tokens, np.memmap)
    assert corpus.window(corpus.sequences(4096) - 1, 4096).tolist()[-1] == 0
    assert corpus.bundles[0].read(tokens - 3, 3).tolist() == [7, 8, 9]
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 100 << 10  # KiB


def test_a_locked_file_can_be_read(tmp_path: Path) -> None:
    """Locks do not work on NFS and Lustre, so that none is asked for."""
    path = write_bundle(tmp_path / "tokens.h5", [[4, 1]])
    with path.open("r+b") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        assert Bundle.open(path).token_count == 2
    assert os.environ["HDF5_USE_FILE_LOCKING"] == "FALSE"


def test_the_fingerprint_tells_data_apart(tmp_path: Path) -> None:
    def fingerprint(name: str, documents: list[list[int]], sha256: str = "ab" * 32) -> str:
        header = replace(HEADER, tokenizer_sha256=sha256)
        return Corpus.open(write_bundle(tmp_path / name, documents, header)).fingerprint

    base = fingerprint("a.h5", [[4, 5, 1], [6, 1]])
    assert fingerprint("same.h5", [[4, 5, 1], [6, 1]]) == base
    others = [
        fingerprint("token.h5", [[4, 5, 1], [7, 1]]),
        fingerprint("border.h5", [[4, 5], [1, 6, 1]]),
        fingerprint("tokenizer.h5", [[4, 5, 1], [6, 1]], "cd" * 32),
    ]
    assert len({base, *others}) == 4


def test_an_unfinished_bundle_is_never_seen(tmp_path: Path) -> None:
    path = tmp_path / "tokens.h5"
    with pytest.raises(RuntimeError), BundleWriter(path, HEADER) as writer:
        writer.append(np.array([4, 1]))
        assert not path.exists()
        raise RuntimeError
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("document", "complaint"),
    [([4, 300], "token id 300, but the vocabulary has 300"), ([-1, 2], "token id -1"), ([], "no tokens")],
)
def test_the_writer_refuses_what_no_tokenizer_made(tmp_path: Path, document: list[int], complaint: str) -> None:
    with pytest.raises(DataError, match=complaint):
        write_bundle(tmp_path / "tokens.h5", [[4, 1], document])
    with pytest.raises(DataError, match="at least one document"):
        write_bundle(tmp_path / "tokens.h5", [])
    assert list(tmp_path.iterdir()) == []


def test_the_tokenizer_beside_the_bundles_is_checked(tmp_path: Path) -> None:
    content = b'{"version": "1.0"}'
    header = replace(HEADER, tokenizer_sha256=hashlib.sha256(content).hexdigest())
    write_bundle(tmp_path / bundle_name(0, 1), [[4, 1]], header)
    corpus = Corpus.open(tmp_path)
    with pytest.raises(DataError, match=r"tokenizer\.json: cannot be read: No such file"):
        corpus.tokenizer_path()
    (tmp_path / "tokenizer.json").write_bytes(content)
    assert corpus.tokenizer_path() == tmp_path / "tokenizer.json"
    (tmp_path / "tokenizer.json").write_bytes(b"{}")
    with pytest.raises(DataError, match="not the tokenizer that made the bundles"):
        corpus.tokenizer_path()


def test_unigram_entropy_is_that_of_the_counts(tmp_path: Path) -> None:
    write_bundle(tmp_path / bundle_name(0, 2), [[4, 4, 4, 4]])
    write_bundle(tmp_path / bundle_name(1, 2), [[5, 5, 6, 7]])
    shares = np.array([4, 2, 1, 1]) / 8
    assert unigram_entropy(Corpus.open(tmp_path)) == pytest.approx(-(shares * np.log(shares)).sum())


@pytest.mark.parametrize("module", ["bundle", "sampler", "schema", "build.bundle_writer", "build.sources"])
def test_importing_never_imports_torch(module: str) -> None:
    code = (
        f"import sys, zslurm.train.data.{module}; sys.exit('torch' in sys.modules or 'tokenizers' in sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
