"""Corpora of tokens: what `data build` makes of Megatron's and MosaicML's files has their very tokens."""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from zslurm.train.data.build.tokenized import documents_of, import_tokens
from zslurm.train.data.build.tokenizer import end_token_id, load_tokenizer, train_tokenizer
from zslurm.train.data.bundle import Corpus
from zslurm.train.errors import DataError

DOCUMENTS = [[5, 6, 7], [8], [9, 10, 11, 12]]
CODES = {"uint16": 8, "int32": 4}


@pytest.fixture
def tokenizer(tmp_path: Path) -> Path:
    path = tmp_path / "tokenizer.json"
    train_tokenizer(["some text that is trained on"], 512).save(str(path))
    return path


def megatron(base: Path, documents: list[list[int]], dtype: str = "uint16") -> Path:
    """As megatron's IndexedDatasetBuilder writes it; the last document is of two sequences."""
    sequences = [*documents[:-1], documents[-1][:1], documents[-1][1:]]
    ids = np.array([token for sequence in sequences for token in sequence], dtype)
    base.with_suffix(".bin").write_bytes(ids.tobytes())
    lengths = np.array([len(sequence) for sequence in sequences], np.int32)
    places = (np.cumsum([0, *lengths[:-1]]) * ids.itemsize).astype(np.int64)
    firsts = np.array([*range(len(documents)), len(sequences)], np.int64)
    head = b"MMIDIDX\0\0" + struct.pack("<QBQQ", 1, CODES[dtype], len(sequences), len(firsts))
    base.with_suffix(".idx").write_bytes(head + lengths.tobytes() + places.tobytes() + firsts.tobytes())
    return base.with_suffix(".idx")


def mds(folder: Path, documents: list[list[int]], encoding: str) -> Path:
    """As streaming's MDSWriter writes it: columns by name, one of them of a fixed size."""
    folder.mkdir()

    def cell(document: list[int]) -> bytes:
        ids = np.array(document, np.uint16)
        return ids.tobytes() if encoding == "bytes" else bytes([1 << 2 | 1, len(document), 0]) + ids.tobytes()

    samples = []
    for number, document in enumerate(documents):
        cells = [b"name" * number, cell(document)]
        sizes = np.array([len(value) for value in cells], np.uint32).tobytes()
        samples.append(sizes + struct.pack("<q", number) + b"".join(cells))
    header = b"{}"
    begin = 4 + 4 * (len(samples) + 1) + len(header)
    places = np.cumsum([begin, *map(len, samples)]).astype(np.uint32)
    body = struct.pack("<I", len(samples)) + places.tobytes() + header + b"".join(samples)
    (folder / "shard.00000.mds").write_bytes(body)
    shard: dict[str, Any] = {
        "format": "mds", "compression": None, "column_names": ["id", "text", "tokens"],
        "column_encodings": ["int", "str", encoding], "column_sizes": [8, None, None],
        "raw_data": {"basename": "shard.00000.mds"}, "samples": len(samples),
    }  # fmt: skip
    (folder / "index.json").write_text(json.dumps({"version": 2, "shards": [shard]}))
    return folder


@pytest.mark.parametrize("kind", ["uint16", "int32", "bytes", "ndarray:uint16"])
def test_the_tokens_are_those_of_the_source(tmp_path: Path, tokenizer: Path, kind: str) -> None:
    end = end_token_id(load_tokenizer(tokenizer), None)
    documents = [[*DOCUMENTS[0], end], *DOCUMENTS[1:]]
    if kind in CODES:
        source = megatron(tmp_path / "corpus", documents, kind)
    else:
        source = mds(tmp_path / "corpus", documents, kind)
    notes: list[str] = []
    summary = import_tokens(
        [source], tmp_path / "out", tokenizer, column="tokens" + ":uint16" * (kind == "bytes"), end_token=None,
        bundle_bytes=1, note=notes.append,
    )  # fmt: skip
    corpus = Corpus.open(tmp_path / "out")
    whole = [documents[0], *([*document, end] for document in documents[1:])]
    stored = np.concatenate([bundle.tokens for bundle in corpus.bundles])
    assert stored.tolist() == [token for document in whole for token in document]
    assert (summary.documents, summary.bundles) == (3, 3)
    assert notes == [f"2 documents did not end with the end-of-document token ({end}), and got one"]


@pytest.mark.parametrize(
    ("spoil", "why"),
    [
        (lambda source: source.write_bytes(b"MMAP"), "does not begin with MMIDIDX"),
        (lambda source: source.write_bytes(source.read_bytes()[:20]), "not a corpus of Megatron or MDS"),
        (lambda source: source.with_suffix(".bin").write_bytes(b"12"), "corpus.bin is too short"),
        (lambda source: source.with_suffix(".bin").unlink(), "No such file"),
    ],
)
def test_a_damaged_corpus_is_refused_in_one_line(tmp_path: Path, spoil: Any, why: str) -> None:
    source = megatron(tmp_path / "corpus", DOCUMENTS)
    spoil(source)
    with pytest.raises(DataError, match=why):
        list(documents_of(source, "tokens"))


def test_an_mds_column_that_is_not_there_or_has_no_type_is_named(tmp_path: Path) -> None:
    folder = mds(tmp_path / "corpus", DOCUMENTS, "bytes")
    with pytest.raises(DataError, match="no column ids; columns: id, text, tokens"):
        list(documents_of(folder, "ids"))
    with pytest.raises(DataError, match="--mds-column tokens:uint16"):
        list(documents_of(folder, "tokens"))
