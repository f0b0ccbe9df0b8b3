"""Heavy commands on a login node, which is shared, give way to everybody else's processes."""

from __future__ import annotations

import os
import re

from zslurm.core.errors import ConfigError
from zslurm.train.niceness import BACKGROUND, in_slurm_job, lower_process

_HIGHEST = 19


def step_back() -> None:
    """Lower this process's priority, unless it runs in a Slurm job; $ZSLURM_NICE sets to what (0: not at all).

    Raises:
        ConfigError: $ZSLURM_NICE is no niceness.
    """
    wanted = os.environ.get("ZSLURM_NICE", "")
    if wanted and (not re.fullmatch("[0-9]{1,2}", wanted) or int(wanted) > _HIGHEST):
        raise ConfigError(f"ZSLURM_NICE={wanted}: expected a niceness from 0 to {_HIGHEST}")
    if not in_slurm_job():
        lower_process(int(wanted) if wanted else BACKGROUND)
