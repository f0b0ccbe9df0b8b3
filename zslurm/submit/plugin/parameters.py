"""The parameters of the executor: submitit's for Slurm, and two of zslurm's."""

from __future__ import annotations

import difflib

from submitit import AutoExecutor
from submitit.slurm import slurm

from zslurm.core.errors import ConfigError
from zslurm.slurm.sbatch_options import OPTIONS

PARAMETERS = frozenset(slurm._get_default_parameters())
"""What submitit's Slurm executor takes: without a prefix there, as `slurm_X` in AutoExecutor."""

OWN = frozenset({"profile", "overrides"})
"""What zslurm adds: the name of a cluster profile, and `KEY=VALUE` assignments over it."""

GENERIC = frozenset(AutoExecutor._typed_parameters())
"""What AutoExecutor has for every cluster."""


class UnknownParameter(ConfigError, ValueError):
    """A parameter that the executor does not have: submitit raises ValueError for one."""


def unknown_parameter(given: str) -> str:
    """Return a line about a parameter that does not exist."""
    prefix = next((prefix for prefix in ("slurm_", "zslurm_") if given.startswith(prefix)), "")
    names = sorted(PARAMETERS | OWN | GENERIC)
    near = difflib.get_close_matches(given.removeprefix(prefix), names, n=1)
    hint = f"did you mean `{prefix}{near[0]}`?" if near else f"there are {', '.join(names)}"
    return f"{given}: no such parameter; {hint}"


SET_BY_SUBMITIT = {option.name: option.of_submitit for option in OPTIONS if option.of_submitit}
"""Options of sbatch that `slurm_additional_parameters` cannot have, each with the reason."""
