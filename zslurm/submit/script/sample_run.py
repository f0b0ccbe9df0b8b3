"""A run to try a template on: small, and as the cluster profile has it."""

from __future__ import annotations

from pathlib import Path

from zslurm.cluster.profile import LOCAL, default_name, profile_layers
from zslurm.config import yaml12
from zslurm.config.layers import Override
from zslurm.config.load import Resolved, resolve
from zslurm.core.errors import ConfigError, SlurmUnavailable

_SAMPLE = """
run: {name: sample, runs_dir: /shared/runs}
data: {path: /shared/data}
phases: [{tokens: 1e9, context: 4096, global_batch: 256, micro_batch: 1, lr: 3e-4}]
slurm: {nodes: 2, time: "24:00:00"}
"""
_NO_PROFILE = {
    "launcher": "slurm",
    "name": "sample",
    "gpus_per_node": 8,
    "cpus_per_node": 96,
    "interface": "eth0",
}


def sample_run(cluster: str | None, *, local: bool) -> Resolved:
    """Return a sample run over a cluster profile.

    Without `cluster` over the usual one, or if there is none over a cluster of 8 GPUs per node; with `local` a
    run for this machine instead of one for Slurm.

    Raises:
        ConfigError, NotFound: the profile is not valid, or not there.
    """
    try:
        name = cluster or default_name()
    except (SlurmUnavailable, ConfigError):
        name = LOCAL
    overrides = [Override.of("cluster.launcher", "local" if local else "slurm")]
    if name == LOCAL and not local:
        overrides.insert(0, Override.of("cluster", _NO_PROFILE))
    document = yaml12.parse(_SAMPLE, "sample run")
    return resolve(Path("sample"), document=document, profile=profile_layers(name), overrides=overrides)
