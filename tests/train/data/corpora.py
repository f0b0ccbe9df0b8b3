"""Small corpora for the tests of this folder."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from train.data.bundle import BundleHeader, BundleWriter

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
