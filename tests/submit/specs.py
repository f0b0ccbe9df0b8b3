"""Resolved runs, and checkpoints that they left, for tests of the launcher."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from tests.train.runs import MODEL
from zslurm.checkpoint_tools import Entry, Tensor, assemble, begin, commit, write_shard
from zslurm.config.spec import RunSpec
from zslurm.run.run_dir import RunDir


def run_spec(directory: Path, **sections: dict[str, Any]) -> RunSpec:
    """A small run below DIRECTORY/runs on the data DIRECTORY/tokens.h5; `sections` add to it."""
    phase = {"tokens": 960, "context": 16, "global_batch": 6, "micro_batch": 2, "lr": 1e-3}
    body: dict[str, Any] = {
        "run": {"name": "tiny", "runs_dir": str(directory / "runs")},
        "model": MODEL,
        "data": {"path": str(directory / "tokens.h5")},
        "phases": [phase],
        "aegis": {"recovery": "restart"},
    }
    for name, section in sections.items():
        body[name] = body.get(name, {}) | section
    return RunSpec.model_validate(body)


def saved(run: RunDir, step: int, cursor: dict[str, Any]) -> None:
    """A checkpoint of the run after `step`, as far as its manifest goes."""
    run.checkpoints.mkdir(parents=True, exist_ok=True)
    directory = begin(run.checkpoints, step, "test")
    report = write_shard(directory, 0, 1, [Entry("w", "master", 0, 2, np.zeros(2, np.float32))], [])
    manifest = assemble(
        [report],
        step=step,
        tokens=96 * step,
        model={},
        cursor=cursor,
        state={},
        tensors=[Tensor("w", (2,), {"master": "F32"})],
        buffers=[],
    )
    commit(run.checkpoints, directory, manifest)
