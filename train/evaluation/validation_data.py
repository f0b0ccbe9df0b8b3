"""Open and check validation data without torch, so that a wrong one is refused when a run is submitted."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from zslurm.train.config import DataConfig, ModelConfig
from zslurm.train.data.bundle import Corpus
from zslurm.train.errors import DataError
from zslurm.train.sections.phases import PhaseConfig


def open_validation_data(
    path: str | Path,
    *,
    tokenizer_sha256: str,
    model: ModelConfig,
    phases: tuple[PhaseConfig, ...],
    training: DataConfig,
) -> Corpus:
    """Open the bundles of evaluation.data, which become sequences as the `training` data do.

    Raises:
        DataError: they are missing, damaged, too small for a phase's context, or made with another tokenizer than
            the run's data.
    """
    try:
        corpus = Corpus.open(path)
        corpus.check_fits(model.vocab_size)
        for phase in phases:
            if (phase.packing or training.packing) == "windows":
                corpus.sequences(phase.context)
    except DataError as error:
        raise DataError(f"evaluation.data: {error}") from error
    if corpus.header.tokenizer_sha256 != tokenizer_sha256:
        raise DataError(
            f"evaluation.data: {corpus.path}: made with another tokenizer than the run's data; build it with "
            "their tokenizer.json (zslurm data build --tokenizer)"
        )
    return corpus


def evenly(available: int, wanted: int) -> NDArray[np.int64]:
    """Choose `wanted` of the sequences [0, available), evenly spread, all if there are fewer; ascending."""
    count = min(available, wanted)
    return np.arange(count, dtype=np.int64) * available // count
