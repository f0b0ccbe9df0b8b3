"""`zslurm hold`."""

from __future__ import annotations

from zslurm.cli.options import Runs


def hold(runs: Runs) -> None:
    """Keep runs that wait in the queue from starting.

    Example: zslurm hold my-run
    """
    from zslurm.core.console import say
    from zslurm.run.find import find_to_change
    from zslurm.submit.control import hold as hold_run

    for run in dict.fromkeys(find_to_change(reference, "hold") for reference in runs):
        say(f"held job {hold_run(run)} of {run.name}; `zslurm release {run.name}` lets it start")
