"""`zslurm cancel`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from zslurm.cli.options import Runs

if TYPE_CHECKING:
    from zslurm.run.find import OrphanJob
    from zslurm.run.run_dir import RunDir


def cancel(
    runs: Runs,
    wait: Annotated[bool, typer.Option("--wait", help="Return when the run has saved and stopped.")] = False,
) -> None:
    """Let runs save and stop; `submit` continues them.

    A job whose run directory is gone is ended as scancel does.

    Example: zslurm cancel my-run
    """
    from zslurm.core.console import say
    from zslurm.run.find import OrphanJob, find_to_change
    from zslurm.submit.control import cancel as cancel_run
    from zslurm.submit.control import cancel_orphan

    found: list[RunDir | OrphanJob] = []
    for reference in runs:
        try:
            found.append(find_to_change(reference, "cancel"))
        except OrphanJob as orphan:
            found.append(orphan)
    for run in dict.fromkeys(found):
        if isinstance(run, OrphanJob):
            say(cancel_orphan(run.job, run.run))
            continue
        job_id = cancel_run(run, wait=wait)
        say(f"cancelled job {job_id} of {run.name}" if job_id else f"{run.name} is not active; nothing to cancel")
