"""From a run file and options to a resolved run, over the cluster profile that applies."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from zslurm.cluster.profile import default_name, load_profile
from zslurm.config import yaml12
from zslurm.config.load import Resolved, resolve


def _named_in(run_file: Path) -> str | None:
    """cluster.name of the run file itself, where it gives one."""
    data: Any = yaml12.read(run_file).data
    section = data.get("cluster") if isinstance(data, dict) else None
    name = section.get("name") if isinstance(section, dict) else None
    return name if isinstance(name, str) else None


def resolve_run(run_file: Path, *, cluster: str | None = None, overrides: Sequence[str] = ()) -> Resolved:
    """Resolve a run file over the profile `cluster`, else the one it names, else the default one.

    Raises:
        ConfigError: anything in the files or overrides is wrong.
        NotFound: the profile does not exist.
        SlurmUnavailable: no profile was named, and there is none.
    """
    name = cluster or _named_in(run_file) or default_name()
    if cluster is not None:
        # The option wins over a run file that names another profile.
        overrides = [*overrides, f"cluster.name={name}"]
    return resolve(run_file, profile=load_profile(name), overrides=tuple(overrides))
