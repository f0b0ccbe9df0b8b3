"""A run that was really trained, once for all tests of checkpoints, and commands in its directory."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.cli.commands import Zslurm
from tests.cli.trained import trained_run


@pytest.fixture(scope="session")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return trained_run(tmp_path_factory.mktemp("work"))


@pytest.fixture
def zslurm(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], run: Path) -> Zslurm:
    """Commands in the directory that holds runs/first."""
    monkeypatch.chdir(run.parent.parent)
    return Zslurm(monkeypatch, capsys)
