"""Commands that are too heavy for a login node: nice where they run here, or run as a job with `--slurm`."""

from __future__ import annotations

import sys
from typing import Annotated

import typer

Slurm = Annotated[bool, typer.Option("--slurm", help="Run it as a Slurm job of one node, and follow it.")]


def here_or_as_job(slurm: bool, *, workers_option: str | None = "--workers") -> None:
    """Go on here, behind everybody else's processes; or run this very command line as a job, and leave.

    Raises:
        typer.Exit: the job is over; with its exit code.
    """
    if slurm:
        from zslurm.submit.as_job import run_as_job

        raise typer.Exit(run_as_job(sys.argv[1:], workers_option=workers_option))
    from zslurm.core.nice import step_back

    step_back()
