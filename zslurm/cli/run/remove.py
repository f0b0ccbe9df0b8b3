"""`zslurm rm`: remove a run's directory."""

from __future__ import annotations

import os
import shutil
import sys
from pathlib import Path
from typing import Annotated

import typer

from zslurm.checkpoint_tools.quantities import show_bytes
from zslurm.cli.options import Runs
from zslurm.core.console import say
from zslurm.core.errors import ConfigError, ZslurmError
from zslurm.run.find import find_all
from zslurm.run.run_dir import RunDir
from zslurm.run.state.run_state import look_all


def rm(
    runs: Runs,
    yes: Annotated[
        bool, typer.Option("-y", "--yes", help="Do not ask; needed where there is no terminal.")
    ] = False,
) -> None:
    """Remove runs with their checkpoints, metrics and logs.

    A run that is active is refused: cancel it first. What is removed cannot be brought back.

    Example: zslurm rm my-run --yes
    """
    found = find_all(runs)
    for state in look_all(found):
        if state.active:
            raise ZslurmError(
                f"{state.run.name}: it is {state.state}; `zslurm cancel {state.run.name} --wait` ends it"
            )
    for run in found:
        if not yes:
            _ask(run)
        _remove(run)
        say(f"removed {run.path}")


def _ask(run: RunDir) -> None:
    """Ask whether a run may be removed.

    Raises:
        ConfigError: there is no terminal to ask on.
        typer.Abort: it may not.
    """
    if not sys.stdin.isatty():
        raise ConfigError(f"{run.name}: without a terminal `zslurm rm` needs --yes")
    saved = len(list(run.checkpoints.glob("step-*")))
    size = show_bytes(_size(run.path))
    typer.confirm(f"remove {run.path} ({size}, checkpoints: {saved})?", abort=True, err=True)


def _size(directory: Path) -> int:
    total = 0
    for folder, _, names in os.walk(directory):
        for name in names:
            path = Path(folder) / name
            total += path.lstat().st_size if path.is_file() or path.is_symlink() else 0
    return total


def _remove(run: RunDir) -> None:
    """Remove a run's directory; its configuration goes first, so that half of a run is no run.

    Raises:
        ZslurmError: the file system refused.
    """
    try:
        if run.path.is_symlink():
            raise ZslurmError(f"{run.path}: a symbolic link; remove what it points to by its own name")
        run.config.unlink()
        shutil.rmtree(run.path)
    except OSError as error:
        raise ZslurmError(f"{error.filename or run.path}: cannot be removed: {error.strerror}") from error
