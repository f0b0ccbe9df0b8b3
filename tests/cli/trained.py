"""A run that was really trained, with a tokenizer: what the commands on checkpoints work on."""

from __future__ import annotations

import json
from pathlib import Path

from tests.train import runs
from tests.train.ranks import train_on
from zslurm.train.data.build.build import build

MODEL = runs.MODEL | {"vocab_size": 512, "skip_rule": "zero"}
CONTEXT = 32
TEXT = "The quick brown fox jumps over the lazy dog. für 12 €, 東京 🙂\n"


def trained_run(directory: Path) -> Path:
    """A finished run of 80 steps in directory/runs/first, its data in directory/data."""
    texts = directory / "texts"
    texts.mkdir(parents=True)
    for number in range(4):
        (texts / f"{number}.txt").write_text(TEXT * 60)
    build([texts], directory / "data", vocab_size=400)
    run = directory / "runs" / "first"
    run.mkdir(parents=True)
    phase = {"tokens": 80 * 4 * CONTEXT, "context": CONTEXT, "global_batch": 4, "micro_batch": 4, "lr": 1e-2}
    config = {
        "run": {"name": "first"},
        "model": MODEL,
        "data": {"path": str(directory / "data")},
        "phases": [phase | {"rope_base": 5000.0}],
        "parallel": {"dtype": "fp32", "threads": 1},
        "checkpoint": {"every_steps": 40},
    }
    (run / "config.json").write_text(json.dumps(config))
    done = train_on(run, ranks=1)
    assert done.returncode == 0, done.stderr
    return run
