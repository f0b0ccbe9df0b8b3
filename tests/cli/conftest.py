"""Fixtures of the command line's tests."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from tests.cli.commands import Shell
from tests.train.runs import make_corpus


@pytest.fixture(scope="session")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A token bundle, made once."""
    return make_corpus(tmp_path_factory.mktemp("corpus") / "tokens.h5")


@pytest.fixture
def shell(
    tmp_path: Path, corpus: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Shell:
    """A user in a fresh directory with data."""
    directory = tmp_path / "work"
    directory.mkdir()
    shutil.copy(corpus, directory / "tokens.h5")
    return Shell(directory, monkeypatch, capsys)
