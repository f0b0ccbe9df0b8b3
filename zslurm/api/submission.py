"""Submit a run from Python."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from zslurm.api.run import Run
from zslurm.checkpoint_tools.plain import StrPath
from zslurm.core.errors import ConfigError


def submit(
    run: StrPath | Mapping[str, Any] | None = None,
    *,
    command: Sequence[StrPath] = (),
    cluster: str | None = None,
    overrides: Mapping[str, Any] | Sequence[str] = (),
    new: bool = False,
) -> Run:
    """Submit a run, or continue it, as `zslurm submit` does.

    Args:
        run: the path of a run file, or what would be in one. None: the run is `command`, and has its name.
        command: a program that trains in the place of zslurm's own trainer.
        cluster: name of the cluster's profile, `local` for this machine; default: as for `zslurm submit`.
        overrides: values by key, such as `{"slurm.nodes": 2}`, or assignments as `--set` takes them.
        new: start over; a run of this name that is there is moved aside.

    Raises:
        ConfigError: something in the run, the profile or the overrides is wrong; one line for each problem.
        NotFound: the run file or the profile does not exist.
        ZslurmError: the run is active, its directory cannot be written, or Slurm refuses it or does not answer.
    """
    from zslurm.config import yaml12
    from zslurm.config.layers import Override
    from zslurm.submit.resolve import resolve_run
    from zslurm.submit.submit import submit as submit_spec

    if run is None and not command:
        raise ConfigError('give a run file, or a program: zslurm.submit(command=["python", "train.py"])')
    if isinstance(overrides, str):
        raise ConfigError(f"overrides: expected a dictionary or a list of KEY=VALUE, got the text {overrides!a}")
    if isinstance(overrides, Mapping):
        changes = [Override.of(key, _plain(value, f"overrides: {key}")) for key, value in overrides.items()]
    else:
        changes = [Override.parse(text) for text in overrides]
    document = yaml12.YamlDocument(_plain(run, "run"), {}) if isinstance(run, Mapping) else None
    resolved = resolve_run(
        None if run is None or isinstance(run, Mapping) else Path(run),
        cluster=cluster,
        overrides=changes,
        program=[str(word) for word in command],
        document=document,
    )
    done = submit_spec(resolved.spec, new=new)
    return Run(done.run, job_id=done.job_id, notes=(*(f"changed: {key}" for key in done.changed), *done.notes))


def _plain(value: Any, where: str) -> Any:
    """Return a value as a run file would give it: paths as text, tuples as lists.

    Raises:
        ConfigError: a value is of no type that a run file has.
    """
    try:
        return json.loads(json.dumps(value, default=os.fspath, allow_nan=False))
    except (TypeError, ValueError) as error:
        raise ConfigError(f"{where}: holds a value that no run file can have: {error}") from error
