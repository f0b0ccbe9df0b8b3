"""Sources whose tokens give their places: token p of a source is first + p."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from zslurm.train.data.build.bundle_writer import BundleWriter
from zslurm.train.data.bundle import BundleHeader, Corpus
from zslurm.train.data.order import DataOrder
from zslurm.train.data.schema import bundle_name
from zslurm.train.data.training_data import TrainingData
from zslurm.train.schedule import Plan
from zslurm.train.sections.phases import PhaseConfig

HEADER = BundleHeader(vocab_size=60_000, tokenizer_sha256="cd" * 32, end_token=1, source="tests")


def numbered(path: Path, *sizes: int, first: int = 0, header: BundleHeader = HEADER) -> Corpus:
    """A corpus of bundles of these many tokens."""
    path.mkdir(parents=True)
    for part, size in enumerate(sizes):
        with BundleWriter(path / bundle_name(part, len(sizes)), header) as writer:
            writer.append(np.arange(first, first + size))
        first += size
    return Corpus.open(path)


def phase(context: int, sequences: int, **keys: Any) -> PhaseConfig:
    """A phase of so many sequences, by default in steps of 6 in microbatches of 2."""
    batches = {"global_batch": 6, "micro_batch": 2} | keys
    return PhaseConfig(tokens=context * sequences, context=context, lr=1e-3, **batches)


def order_of(corpora: Mapping[str, Corpus], phases: Sequence[PhaseConfig], seed: int = 0) -> DataOrder:
    """The order of a run."""
    return DataOrder(TrainingData(dict(sorted(corpora.items()))), Plan(tuple(phases)), seed)
