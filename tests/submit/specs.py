"""Resolved runs for tests of the launcher."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tests.train.runs import MODEL
from zslurm.config.spec import RunSpec


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
