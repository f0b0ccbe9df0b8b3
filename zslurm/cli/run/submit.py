"""`zslurm submit`. What it does is in `submission/command.py`, which `zslurm submit --help` does not load."""

from __future__ import annotations

from zslurm.cli.options import command_of
from zslurm.cli.run.submission.options import SubmitOptions


def _submit(options: SubmitOptions) -> None:
    """Submit a run, or continue it.

    Example: zslurm submit run.yaml --nodes 4 --set phases.0.lr=3e-4
    """
    from zslurm.cli.run.submission.command import submit_run  # the whole of the submission

    submit_run(options)


submit = command_of(SubmitOptions, _submit)
