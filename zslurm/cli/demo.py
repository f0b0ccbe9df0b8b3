"""`zslurm demo`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def demo(
    directory: Annotated[
        Path, typer.Option("--dir", help="Where to work; made anew each time.", metavar="DIR")
    ] = Path("demo"),
    tokens: Annotated[
        int | None,
        typer.Option(
            "--tokens",
            min=100_000,  # demo_size.FEWEST_TOKENS
            help="How many tokens to train on. [default: what this machine can do in about two minutes]",
        ),
    ] = None,
) -> None:
    """Train a tiny ZAYA1 on real text, on this machine.

    The text is the Python standard library's sources; neither Slurm nor a GPU is needed. The demo first measures
    how fast this machine trains, and chooses how many tokens there is time for: at most a million.

    Example: zslurm demo
    """
    from zslurm.report.demo import run_demo

    raise typer.Exit(run_demo(directory, tokens))
