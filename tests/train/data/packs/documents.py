"""Corpora of numbered documents: token j of document d is a number that no other token has."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from zslurm.train.data.build.bundle_writer import BundleWriter
from zslurm.train.data.bundle import BundleHeader, Corpus
from zslurm.train.data.schema import bundle_name

HEADER = BundleHeader(vocab_size=1_000_000, tokenizer_sha256="cd" * 32, end_token=1, source="tests")


def corpus_of(directory: Path, *bundles: Sequence[int], first: int = 10, masked: bool = False) -> Corpus:
    """Bundles of documents of these many tokens, numbered from `first`; a mask leaves out the odd ones."""
    directory.mkdir(parents=True)
    for part, lengths in enumerate(bundles):
        with BundleWriter(directory / bundle_name(part, len(bundles)), HEADER, masked=masked) as writer:
            for length in lengths:
                document = np.arange(first, first + length)
                writer.append(document, document % 2 == 0 if masked else None)
                first += length
    return Corpus.open(directory)
