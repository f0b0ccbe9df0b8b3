"""Check the program of a run whose trainer is not zslurm's own, as far as the login node can see it."""

from __future__ import annotations

import os
import re
import shutil
from pathlib import Path

from zslurm.config.spec import RunSpec
from zslurm.config.trainer import TrainerSection
from zslurm.core.errors import ConfigError, RunCompleted
from zslurm.run.run_dir import RunDir
from zslurm.run.state.run_state import look

_PYTHON = re.compile(r"python[\d.]*")


def check_program(spec: RunSpec) -> None:
    """Check command and directory.

    A program that modules, setup lines, a container or cluster.venv bring may be missing here.

    Raises:
        ConfigError: the directory, the program, or the Python script that it runs is not there.
    """
    trainer, cluster = spec.trainer, spec.cluster
    assert trainer is not None
    directory = Path(trainer.directory)
    elsewhere = cluster.container is not None
    if not elsewhere and not directory.is_dir():
        raise ConfigError(f"trainer.directory: there is no directory {directory}")
    brought = elsewhere or bool(cluster.modules or cluster.setup or cluster.venv)
    _check_found(trainer, directory, brought=brought)
    if not elsewhere:
        _check_script(trainer, directory)


def notes_on_program(spec: RunSpec, continues: RunDir | None) -> list[str]:
    """Return what is worth knowing about a run of a program, a line each.

    Raises:
        RunCompleted: the run has completed, and would do the same again.
    """
    trainer = spec.trainer
    assert trainer is not None
    if continues is not None and continues.submitted and look(continues).state == "completed":
        raise RunCompleted(
            f"{continues.name}: the run has completed: its program ended with exit code 0 on every rank; start "
            "over with --new, or choose another run.name"
        )
    notes = _watched(spec, trainer)
    if not trainer.checkpoints:
        notes.append(_NO_CHECKPOINTS.format(spec.aegis.retries))
    if spec.cluster.launcher == "slurm" and trainer.stop_s > spec.slurm.save_margin_s:
        notes.append(
            f"trainer.stop_s ({trainer.stop_s:g} s) is longer than slurm.save_margin_s "
            f"({spec.slurm.save_margin_s} s): at the time limit Slurm kills the program before it had time to stop"
        )
    return notes


_NO_CHECKPOINTS = (
    "trainer.checkpoints: without a pattern no restart counts as progress; the run stops after {} failures "
    "(aegis.retries)"
)


def _check_found(trainer: TrainerSection, directory: Path, *, brought: bool) -> None:
    word = trainer.command[0]
    if "{" in word or (brought and "/" not in word):
        return
    program = directory / word if "/" in word else shutil.which(word)
    if program is None:
        raise ConfigError(f"trainer.command: there is no program `{word}` on your PATH")
    if not brought and not os.access(program, os.X_OK):
        raise ConfigError(f"trainer.command: {program} is not there, or not executable")


def _check_script(trainer: TrainerSection, directory: Path) -> None:
    """Refuse `python train.py` without a train.py."""
    program, *words = trainer.command
    is_script = bool(_PYTHON.fullmatch(Path(program).name) and words and words[0].endswith(".py"))
    if is_script and "{" not in words[0] and not (directory / words[0]).is_file():
        raise ConfigError(f"trainer.command: {directory / words[0]} is not there")


def _watched(spec: RunSpec, trainer: TrainerSection) -> list[str]:
    """Return how a hang will be noticed, if that has to be known."""
    source = trainer.progress
    if source.pattern is not None:
        return []
    if source.grows is not None:
        limit = spec.aegis.hang.step_s
        return [f"trainer.progress.grows: {limit:g} s without growth count as a hang (aegis.hang.step_s)"]
    return [
        "trainer.progress: a hang is noticed only if the program calls zslurm.progress.step, or with a pattern or "
        "a file that grows"
    ]
