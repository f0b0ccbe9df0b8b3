"""Small corpora for the tests of this folder."""

from __future__ import annotations

import gzip
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow
import zstandard
from pyarrow import parquet

from zslurm.train.data.build.bundle_writer import BundleWriter
from zslurm.train.data.build.tokenizer import load_tokenizer
from zslurm.train.data.bundle import BundleHeader, Corpus

HEADER = BundleHeader(vocab_size=300, tokenizer_sha256="ab" * 32, end_token=1, source="tests")


def write_bundle(path: Path, documents: Sequence[Sequence[int]], header: BundleHeader = HEADER) -> Path:
    """A bundle with these documents."""
    with BundleWriter(path, header) as writer:
        for document in documents:
            writer.append(np.array(document))
    return path


def write_texts(directory: Path, **texts: str | bytes) -> Path:
    """A directory of `.txt` files; double underscores in a name stand for a slash."""
    for name, text in texts.items():
        path = directory / f"{name.replace('__', '/')}.txt"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(text if isinstance(text, bytes) else text.encode())
    return directory


def write_rows(path: Path, rows: Sequence[Mapping[str, Any]]) -> Path:
    """Rows as JSON lines, compressed or not, or as Parquet (row groups of two), by the name."""
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.suffix == ".parquet":
        parquet.write_table(pyarrow.Table.from_pylist(list(rows)), path, row_group_size=2)
        return path
    content = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows).encode()
    if path.suffix == ".gz":
        content = gzip.compress(content, compresslevel=1, mtime=0)
    if path.suffix == ".zst":
        content = zstandard.compress(content)
    path.write_bytes(content)
    return path


def contents(directory: Path) -> dict[str, bytes]:
    """The files of a directory."""
    return {path.name: path.read_bytes() for path in sorted(directory.iterdir())}


def texts_of(corpus: Corpus) -> list[str]:
    """The texts of the documents, decoded; each must end with the end-of-document token, and have no other."""
    tokenizer = load_tokenizer(corpus.tokenizer_path())
    end = corpus.header.end_token
    found = []
    for bundle in corpus.bundles:
        for start, stop in zip(bundle.documents[:-1], bundle.documents[1:], strict=True):
            tokens = bundle.read(int(start), int(stop - start)).tolist()
            assert tokens.index(end) == len(tokens) - 1
            found.append(tokenizer.decode(tokens[:-1]))
    return found
