"""Fixtures of all tests, and an environment in which no test sees the user's own runs, profiles or Slurm."""

from __future__ import annotations

import os

import pytest

pytest_plugins = ["tests.cluster.fixtures"]

# What a job, a site or a user may have set in the shell that runs the tests.
_FOREIGN = ("SLURM_", "SBATCH_", "ZSLURM_", "PMI_", "PMIX_")


@pytest.fixture(autouse=True)
def own_environment(monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory) -> None:
    """Configuration and state of zslurm in a fresh place; nothing of the surrounding shell."""
    home = tmp_path_factory.mktemp("home")
    monkeypatch.setenv("HOME", str(home))
    monkeypatch.setenv("XDG_CONFIG_HOME", str(home / "config"))
    monkeypatch.setenv("XDG_STATE_HOME", str(home / "state"))
    for name in [name for name in os.environ if name.startswith(_FOREIGN)]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("ZSLURM_NICE", "0")
