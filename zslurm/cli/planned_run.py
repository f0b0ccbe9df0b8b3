"""The run that a plan is made for: a plan needs no cluster profile of the user's own."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from zslurm.config import yaml12
from zslurm.config.layers import Override
from zslurm.config.spec import RunSpec
from zslurm.core.console import say
from zslurm.core.errors import NoProfile
from zslurm.submit.resolve import resolve_run

PUBLISHED = "mi300x-pollara"
"""The shipped profile of the cluster on which ZAYA1 was trained."""


def planned_run(run_file: Path, cluster: str | None, overrides: Sequence[Override]) -> RunSpec:
    """Return the resolved run over the profile that applies, or the published one if the user has none yet.

    Raises:
        ConfigError, NotFound: see `resolve_run`.
    """
    return planned_runs(run_file, cluster, [overrides])[0]


def planned_runs(run_file: Path, cluster: str | None, variants: Sequence[Sequence[Override]]) -> list[RunSpec]:
    """Return the run resolved with each of several lists of overrides, as `planned_run` does with one.

    Raises:
        ConfigError, NotFound: see `resolve_run`.
    """
    # Standard input and pipes (`<(...)`) can be read only once.
    streamed = run_file == yaml12.STDIN or run_file.is_fifo()
    document = yaml12.read(run_file) if streamed else None

    def resolved(overrides: Sequence[Override]) -> RunSpec:
        return resolve_run(run_file, cluster=cluster, overrides=overrides, document=document).spec

    try:
        return [resolved(overrides) for overrides in variants]
    except NoProfile:
        say(f"note: planned for the profile {PUBLISHED}, as there is none of yours yet; --cluster names another")
        cluster = PUBLISHED
        return [resolved(overrides) for overrides in variants]


def trains_on_cpus(spec: RunSpec) -> bool:
    """Return whether the ranks will be CPUs: as asked, else if the cluster's nodes have no GPUs."""
    return spec.parallel.device == "cpu" or (spec.parallel.device == "auto" and not spec.cluster.gpus_per_node)
