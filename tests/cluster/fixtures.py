"""pytest fixtures: a real Slurm without and one with accounting, each started once per session when asked for.

The two coexist: they share nothing but the machine. Where no cluster can run, tests are skipped with the reason,
and with CI=true in the environment they fail: a skipped cluster test proves nothing.
"""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

from tests.cluster.config_files import Timing
from tests.cluster.slurm_cluster import SlurmCluster, why_impossible


@pytest.fixture(scope="session")
def slurm_cluster() -> Iterator[SlurmCluster]:
    """Eight nodes of eight MI300X GPUs, no accounting. Shared: leave it as found (`restore`)."""
    yield from _cluster(accounting=False, timing=Timing())


@pytest.fixture(scope="session")
def slurm_cluster_with_accounting() -> Iterator[SlurmCluster]:
    """The same with slurmdbd. Its controller forgets finished jobs within half a minute: readers need sacct."""
    yield from _cluster(accounting=True, timing=Timing(min_job_age_s=10))


def _cluster(*, accounting: bool, timing: Timing) -> Iterator[SlurmCluster]:
    if reason := why_impossible(accounting=accounting):
        if os.environ.get("CI", "").lower() == "true":
            pytest.fail(f"CI must run the cluster tests: {reason}")
        pytest.skip(reason)
    with SlurmCluster(accounting=accounting, timing=timing) as cluster:
        yield cluster
