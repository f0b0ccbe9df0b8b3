"""A run that was really trained, with a tokenizer: what the commands on checkpoints work on."""

from __future__ import annotations

import fcntl
import json
import shutil
from pathlib import Path

from tests import forked
from tests.train import runs
from tests.waiting import DEADLINE_S
from zslurm.train.data.build.build import build

MODEL = runs.MODEL | {"vocab_size": 512, "skip_rule": "zero"}
CONTEXT = 32
TEXT = "The quick brown fox jumps over the lazy dog. für 12 €, 東京 🙂\n"


def trained_run(directory: Path) -> Path:
    """A finished run of 80 steps in directory/runs/first, its data in directory/data.

    It is trained once for all processes of tests, next to the servers that they share, and copied from there.
    """
    made = forked.place() / "trained"
    with made.with_suffix(".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not made.exists():
            _train(draft := made.with_suffix(".draft"))
            draft.rename(made)
    shutil.copytree(made, directory, dirs_exist_ok=True)
    run = directory / "runs" / "first"
    config = json.loads((run / "config.json").read_text())
    config["data"]["path"] = str(directory / "data")
    (run / "config.json").write_text(json.dumps(config))
    return run


def _train(directory: Path) -> None:
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
    done = forked.server(torch=True).run(
        [str(run)], module="zslurm.train", env=runs.clean_environment(), cwd=directory, timeout=DEADLINE_S
    )
    assert done.returncode == 0, done.stderr
