"""`zslurm cancel`."""

from __future__ import annotations

from typing import Annotated

import typer

from zslurm.cli.options import Runs


def cancel(
    runs: Runs,
    wait: Annotated[bool, typer.Option("--wait", help="Return when the run has saved and stopped.")] = False,
) -> None:
    """Let runs save and stop; `submit` continues them.

    Example: zslurm cancel my-run
    """
    from zslurm.cli.output import say
    from zslurm.launch.control import cancel as cancel_run
    from zslurm.launch.find import find_all

    for run in find_all(runs):
        job_id = cancel_run(run, wait=wait)
        say(f"cancelled job {job_id} of {run.name}" if job_id else f"{run.name} is not active; nothing to cancel")
