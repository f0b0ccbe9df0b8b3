"""Runs whose trainer is `toy_program.py`: their section `trainer`, and what the program noted of its steps."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from zslurm.run.run_dir import RunDir
from zslurm.train.jsonl import read_jsonl

TOY = Path(__file__).resolve().parent / "toy_program.py"


def command(steps: int, *words: object, python: Path | str = sys.executable, program: Path = TOY) -> list[str]:
    """Return the command of a run of `steps` steps; `-I`, as nothing that it imports is on a PYTHONPATH."""
    return [str(word) for word in (python, "-I", program, steps, *words)]


def trainer(steps: int, *words: object, **places: Any) -> dict[str, Any]:
    """Return the section `trainer` of a run that counts to `steps`.

    Args:
        steps: of the whole run.
        words: options and faults of the program.
        places: `python` and `program` of `command`.
    """
    checkpoints = "{output_dir}/saved/*.json"
    return {"command": command(steps, *words, **places), "checkpoints": checkpoints, "steps": steps}


def notes(run: RunDir) -> Path:
    """Return the file in which the program notes each of its steps."""
    return run.output / "steps.jsonl"


def steps_of(run: RunDir) -> list[dict[str, Any]]:
    """Return the steps of a run: all that the program noted, or those in the metrics of zslurm's trainer.

    The metrics of a program have only the steps at which its rank looked, ten times a second.
    """
    rows = read_jsonl(notes(run) if notes(run).exists() else run.metrics)
    return [row for row in rows if row["kind"] == "step"]


def saved_step(run: RunDir) -> int:
    """Return the newest step that the program has saved; 0 if there is none."""
    return max((int(path.stem) for path in (run.output / "saved").glob("*.json")), default=0)
