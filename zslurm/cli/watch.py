"""`zslurm watch`."""

from __future__ import annotations

from typing import Annotated

import typer

from zslurm.cli.options import SomeRuns


def watch(
    runs: SomeRuns = None,
    interval: Annotated[
        float, typer.Option("-i", "--interval", min=1.0, metavar="SECONDS", help="Seconds between two looks.")
    ] = 5.0,
) -> None:
    """Show your active runs, or those that are named until they rest. Ctrl-C ends the view, not the runs.

    Without a terminal, prints a line for every change.

    Example: zslurm watch my-run
    """
    from zslurm.report.watch import watch as watch_runs
    from zslurm.run.find import find_all

    raise typer.Exit(watch_runs(find_all(runs) if runs else None, interval_s=interval))
