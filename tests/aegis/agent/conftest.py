"""Fixtures of several tests of the agent."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.aegis.standby_job import Job


@pytest.fixture
def job(tmp_path: Path) -> Job:
    """A run whose job 12 runs on three nodes."""
    return Job(tmp_path)
