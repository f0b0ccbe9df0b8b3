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
    exclude: Annotated[
        str | None,
        typer.Option(
            "--exclude", metavar="NODES", help="A hostlist of nodes that the job must not use from now on."
        ),
    ] = None,
) -> None:
    """Put a run's job back into the queue.

    The run saves, stops, and continues from that checkpoint when it starts again. With --exclude it is held
    until the nodes are on its list, and released then, so that it cannot start on them in between.

    Example: zslurm requeue my-run --exclude node[3,7]
    """
    from zslurm.core.console import say
    from zslurm.run.find import find_to_change
    from zslurm.submit.control import requeue as requeue_run

    found = find_to_change(run, "requeue")
    done = requeue_run(found, now=now, exclude=exclude)
    what = f"requeued {found.name} as" if done.action == "requeue" else f"{found.name} waits on as"
    without = f", without {exclude}" if exclude else ""
    say(f"{what} job {done.job_id}{without}")
