"""`zslurm release`."""

from __future__ import annotations

from zslurm.cli.options import Runs


def release(runs: Runs) -> None:
    """Let held runs start.

    Example: zslurm release my-run
    """
    from zslurm.core.console import say
    from zslurm.run.find import find_to_change
    from zslurm.submit.control import release as release_run

    for run in dict.fromkeys(find_to_change(reference, "release") for reference in runs):
        say(f"released job {release_run(run)} of {run.name}")
