"""Checkpoints of programs that are not ours: what `trainer.checkpoints` matches."""

from __future__ import annotations

import glob
import os
import re
from collections.abc import Callable
from pathlib import Path

from zslurm.config.trainer import TrainerSection
from zslurm.run.run_dir import RunDir


def newest_step(trainer: TrainerSection, run: RunDir) -> int:
    """Return the step of the newest checkpoint that matches; -1 if none does.

    The step is the last number in the part of a path that the pattern leaves open. If there is none, a
    checkpoint counts by when it changed, in UNIX seconds.
    """
    if trainer.checkpoints is None:
        return -1
    path_pattern = in_run(trainer.checkpoints, run, glob.escape)
    pattern = os.path.join(glob.escape(trainer.directory), path_pattern)  # noqa: PTH118 - a pattern, and no path
    paths = glob.iglob(pattern)  # noqa: PTH207 - patterns may be absolute
    return max((_step_of(path, trainer.checkpoints) for path in paths), default=-1)


def in_run(place: str, run: RunDir, escape: Callable[[str], str] = str) -> str:
    """Return a path or pattern with its placeholders replaced."""
    place = place.replace("{run_dir}", escape(str(run.path)))
    return place.replace("{output_dir}", escape(str(run.output)))


def _step_of(path: str, pattern: str) -> int:
    for name, part_pattern in zip(reversed(Path(path).parts), reversed(Path(pattern).parts), strict=False):
        if glob.has_magic(part_pattern) and (numbers := re.findall(r"\d+", name)):
            return int(numbers[-1])
    try:
        return int(Path(path).stat().st_mtime)
    except OSError:
        return -1
