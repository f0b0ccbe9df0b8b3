"""A cluster's profile for the plugin of submitit, and submitit with our classes in place of its Slurm classes."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

import pytest
from submitit import AutoExecutor
from submitit.core import plugins, test_core, utils
from submitit.slurm import slurm

from zslurm.cluster.profile import save_profile
from zslurm.submit.plugin.executor import ZslurmExecutor
from zslurm.submit.plugin.job import JobWatcher, ZslurmJob
from zslurm.submit.plugin.job_environment import ZslurmJobEnvironment

PROFILE = """
cluster:
  launcher: slurm
  gpus_per_node: 8
  gpu_type: mi300x
  cpus_per_node: 96
  network: pollara
slurm: {account: lab}
"""


@pytest.fixture
def profile(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """The only profile of the user; returns its name."""
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    monkeypatch.delenv("ZSLURM_CLUSTER", raising=False)
    save_profile("lab", PROFILE, make_default=True)
    return "lab"


@contextlib.contextmanager
def job_context(self: test_core.MockedSubprocess, job_id: str) -> Iterator[None]:
    """As submitit's: the environment of a task, of the executor `zslurm` here."""
    with utils.environment_variables(
        _USELESS_TEST_ENV_VAR_="1", SUBMITIT_EXECUTOR="zslurm", SLURM_JOB_ID=str(job_id)
    ):
        yield None


@pytest.fixture
def our_classes(profile: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """submitit's own tests of Slurm work with our classes, and AutoExecutor uses them unasked."""
    plugins.get_executors(), plugins.get_job_environments()  # kept from the first call on: with submitit's classes
    monkeypatch.setattr(slurm, "SlurmExecutor", ZslurmExecutor)
    monkeypatch.setattr(slurm, "SlurmJob", ZslurmJob)
    monkeypatch.setattr(slurm, "SlurmJobEnvironment", ZslurmJobEnvironment)
    monkeypatch.setattr(slurm, "SlurmInfoWatcher", JobWatcher)
    monkeypatch.setattr(test_core.MockedSubprocess, "job_context", job_context)
    monkeypatch.setattr(AutoExecutor, "which", staticmethod(ZslurmExecutor.name))
    yield
    ZslurmJob.watcher.clear()
