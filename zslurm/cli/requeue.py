"""`zslurm requeue`."""

from __future__ import annotations

from typing import Annotated

import typer

from zslurm.cli.options import Run


def requeue(
    run: Run,
    now: Annotated[
        bool, typer.Option("--now", help="Do not sit out Slurm's pause of about two minutes before the start.")
    ] = False,
) -> None:
    """Put a run's job back into the queue.

    The run saves, stops, and continues from that checkpoint when it starts again.

    Example: zslurm requeue my-run
    """
    from zslurm.cli.output import say
    from zslurm.launch.control import requeue as requeue_run
    from zslurm.launch.index import find_run

    found = find_run(run)
    job_id = requeue_run(found, now=now)
    say(f"requeued {found.name} as job {job_id}")
