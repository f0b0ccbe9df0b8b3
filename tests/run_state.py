"""The state of a run as `zslurm status RUN --json` shows it, without starting a command for it."""

from __future__ import annotations

from contextlib import suppress
from typing import Any

from zslurm.cli.run.status import details_as_json
from zslurm.core.errors import ZslurmError
from zslurm.run.run_dir import RunDir
from zslurm.run.state.run_state import look
from zslurm.slurm.client import SlurmClient
from zslurm.slurm.run_command import Retries


def state_of(run: RunDir) -> dict[str, Any]:
    """Read the run's files and ask its launcher, again: nothing is kept that a command of the user's could see."""
    found, excluded = look(run), None
    if found.active and found.launcher == "slurm" and found.job_id is not None and found.as_of is None:
        with suppress(ZslurmError):  # the job is gone by now, or the controller
            excluded = SlurmClient(retries=Retries(attempts=1)).excluded_nodes(found.job_id)
    return details_as_json(found, excluded)
