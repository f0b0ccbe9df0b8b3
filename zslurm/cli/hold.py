"""`zslurm hold`."""

from __future__ import annotations

from zslurm.cli.options import Runs


def hold(runs: Runs) -> None:
    """Keep runs that wait in the queue from starting.

    Example: zslurm hold my-run
    """
    from zslurm.cli.output import say
    from zslurm.launch.control import hold as hold_run
    from zslurm.launch.find import find_all

    for run in find_all(runs):
        say(f"held job {hold_run(run)} of {run.name}; `zslurm release {run.name}` lets it start")
