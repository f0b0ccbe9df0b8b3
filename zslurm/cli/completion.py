"""`zslurm completion`."""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated

import typer
from typer.completion import get_completion_script  # type: ignore[attr-defined]


class Shell(StrEnum):
    """Shells that can complete zslurm's commands."""

    BASH = "bash"
    ZSH = "zsh"
    FISH = "fish"


def completion(shell: Annotated[Shell, typer.Argument(help="Which shell.")]) -> None:
    """Print the script for completion in your shell.

    It completes commands, options, runs, clusters, configuration keys, recipes and templates.

    Into the shell's start file: eval "$(zslurm completion bash)"

    Example: zslurm completion bash
    """
    print(get_completion_script(prog_name="zslurm", complete_var="_ZSLURM_COMPLETE", shell=shell.value))
