"""Ranks that a command starts: forked from a process that has their imports, in the command's environment."""

from __future__ import annotations

import os
import sys
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest

from tests.checkout import ROOT
from tests.train.ranks import forked
from zslurm.train.parallel.local_ranks import local_ranks


def describe(rank: int, ranks: int, word: str, answer: Connection) -> None:
    has_torch = "libtorch" in Path(f"/proc/{os.getppid()}/maps").read_text()
    answer.send((rank, ranks, word, os.environ.get("WORD"), str(Path.cwd()), os.getppid(), has_torch))


def described(word: str) -> list[Any]:
    with local_ranks(describe, 2, word) as readers:
        return [reader.recv() for reader in readers]


def test_ranks_have_the_environment_that_the_command_has_when_they_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also if others of this process have started before."""
    servers = set()
    for word in ("one", "two"):
        monkeypatch.setenv("WORD", word)
        (tmp_path / word).mkdir()
        monkeypatch.chdir(tmp_path / word)
        found = described(word)
        assert [one[:5] for one in found] == [(rank, 2, word, word, str(tmp_path / word)) for rank in range(2)]
        servers |= {one[5:] for one in found}
    assert len(servers) == 1, "all are forked from one process"


def start_in(directory: Path) -> None:
    """Start ranks from a directory, by a server that this process starts."""
    os.environ["PYTHONPATH"] = str(ROOT)
    os.environ.pop("PYTHONSAFEPATH", None)
    os.chdir(directory)
    found = described("here")
    assert [one[6] for one in found] == [True, True], "the server has imported torch for both"
    assert "PYTHONSAFEPATH" not in os.environ
    sys.exit(23)


def test_a_file_of_the_working_directory_hides_no_module_of_python(tmp_path: Path) -> None:
    (tmp_path / "json.py").write_text("raise SystemExit('not the json that is meant')")
    assert forked(start_in, tmp_path) == 23
