"""pytest fixtures: a real Slurm without and one with accounting, each started once per session when asked for.

The two coexist: they share nothing but the machine. If no cluster can run, tests are skipped with the reason,
and with CI=true in the environment they fail: a skipped cluster test proves nothing.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

import pytest

from tests.on_slurm.cluster.config_files import Timing
from tests.on_slurm.cluster.slurm_cluster import SlurmCluster, why_impossible


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip what needs a cluster that cannot run, with one line in the summary for each file."""
    if not _in_ci() and (reason := why_impossible()):
        for item in items:
            if "slurm_possible" in getattr(item, "fixturenames", ()):
                item.add_marker(pytest.mark.skip(reason=reason))


@pytest.fixture(scope="session")
def slurm_possible() -> None:
    """A cluster can run here; what asks for one, or starts one itself, asks for this."""
    _require()


@pytest.fixture(scope="session")
def slurm_cluster(slurm_possible: None) -> Iterator[SlurmCluster]:
    """Eight nodes of eight MI300X GPUs, no accounting. Shared: leave it as found (`restore`)."""
    yield from running()


@pytest.fixture(scope="session")
def slurm_cluster_with_accounting(slurm_possible: None) -> Iterator[SlurmCluster]:
    """The same with slurmdbd. Its controller forgets finished jobs within half a minute: readers need sacct."""
    yield from running(accounting=True, timing=Timing(min_job_age_s=10))


def running(*, accounting: bool = False, **settings: Any) -> Iterator[SlurmCluster]:
    """What a fixture yields: a cluster with these settings of `SlurmCluster`, or the reason why there is none."""
    _require(accounting=accounting)
    with SlurmCluster(accounting=accounting, **settings) as cluster:
        yield cluster


def _require(*, accounting: bool = False) -> None:
    if reason := why_impossible(accounting=accounting):
        if _in_ci():
            pytest.fail(f"CI must run the cluster tests: {reason}")
        pytest.skip(reason)


def _in_ci() -> bool:
    return os.environ.get("CI", "").lower() == "true"
