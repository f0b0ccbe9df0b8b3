"""Checkpoints of programs that are not ours: what `trainer.checkpoints` matches."""

from __future__ import annotations

import glob
import os
import re
from pathlib import Path

from zslurm.config.trainer import TrainerSection
from zslurm.run.run_dir import RunDir


def newest_step(trainer: TrainerSection, run: RunDir) -> int:
    """Return the step of the newest checkpoint: the highest last number in a path that matches; -1: none does.

    A path without a number counts by when it changed, in UNIX seconds.
    """
    if trainer.checkpoints is None:
        return -1
    given = trainer.checkpoints.replace("{run_dir}", glob.escape(str(run.path)))
    given = given.replace("{output_dir}", glob.escape(str(run.output)))
    pattern = os.path.join(glob.escape(trainer.directory), given)  # noqa: PTH118 - a pattern, and no path
    return max(map(_step_of, glob.iglob(pattern)), default=-1)  # noqa: PTH207 - patterns may be absolute


def _step_of(path: str) -> int:
    if numbers := re.findall(r"\d+", Path(path).name) or re.findall(r"\d+", Path(path).parent.name):
        return int(numbers[-1])
    try:
        return int(Path(path).stat().st_mtime)
    except OSError:
        return -1
