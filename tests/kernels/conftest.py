"""Builds of kernels are kept for this run of the tests, and shared by its processes."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from zslurm.kernels.hip.build import CACHE_VARIABLE


@pytest.fixture(autouse=True)
def kernel_cache(
    own_environment: None, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> Path:
    """The directory that this run's tests build kernels in."""
    base = tmp_path_factory.getbasetemp()
    cache = (base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / "kernels"
    monkeypatch.setenv(CACHE_VARIABLE, str(cache))
    return cache
