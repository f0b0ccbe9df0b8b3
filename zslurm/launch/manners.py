"""Manners on a login node, which is shared: heavy commands step back behind everybody else's."""

from __future__ import annotations

import contextlib
import os

_NICENESS = 10


def step_back() -> None:
    """Lower this process's priority, unless it runs in a job; $ZSLURM_NICE says by how much (0: not at all)."""
    wanted = os.environ.get("ZSLURM_NICE", "")
    niceness = int(wanted) if wanted.isdigit() else _NICENESS
    here = os.getpriority(os.PRIO_PROCESS, 0)
    if "SLURM_JOB_ID" not in os.environ and here < niceness:
        with contextlib.suppress(OSError):
            os.nice(niceness - here)
