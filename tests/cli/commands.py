"""The command line in tests: the real `main`, in this process or in a fresh one."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests import forked
from tests.train.runs import MODEL, clean_environment
from tests.waiting import DEADLINE_S
from zslurm.cli.main import main

PHASE = {"tokens": 960, "context": 16, "global_batch": 6, "micro_batch": 2, "lr": 1e-3}


@dataclass(frozen=True)
class Outcome:
    """What a command did."""

    code: int
    stdout: str
    stderr: str

    @property
    def json(self) -> Any:
        return json.loads(self.stdout)


class Zslurm:
    """Runs commands as the console script does, in this process; `ok` also checks that they worked."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
        self._monkeypatch, self._capsys = monkeypatch, capsys

    def __call__(self, *arguments: str | Path) -> Outcome:
        self._monkeypatch.setattr(sys, "argv", ["zslurm", *map(str, arguments)])
        self._capsys.readouterr()
        with pytest.raises(SystemExit) as ended:
            main()
        out, messages = self._capsys.readouterr()
        return Outcome(int(ended.value.code or 0), out, messages)

    def ok(self, *arguments: str | Path) -> Outcome:
        done = self(*arguments)
        assert done.code == 0, done.stderr
        return done


class Shell:
    """A user at work in a directory, with a home of his own; `tokens.h5` is there, and nothing else."""

    def __init__(
        self, directory: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
    ) -> None:
        self.directory = directory
        self.zslurm = Zslurm(monkeypatch, capsys)
        monkeypatch.chdir(directory)

    def write_run(self, **sections: Any) -> Path:
        """`run.yaml`: a small run for this machine; `sections` add to it or replace it. JSON is YAML."""
        body: dict[str, Any] = {
            "run": {"name": "tiny"},
            "model": MODEL,
            "data": {"path": "tokens.h5"},
            "phases": [PHASE],
            "cluster": {"name": "local"},
        }
        for name, section in sections.items():
            merges = isinstance(section, dict) and isinstance(body.get(name), dict)
            body[name] = body[name] | section if merges else section
        path = self.directory / "run.yaml"
        path.write_text(json.dumps(body, indent=1))
        return path

    def fails(self, *arguments: str | Path) -> tuple[int, str]:
        """A command that must be refused: its code and its one line; nothing was printed or written."""
        before = self.everything()
        done = self.zslurm(*arguments)
        check_refused(done)
        assert self.everything() == before, "a refused command writes nothing"
        return done.code, done.stderr.rstrip("\n")

    def everything(self) -> dict[str, bytes]:
        """Every path in the directory and in the home; files with their content."""
        paths = [path for root in (self.directory, Path.home()) for path in sorted(root.rglob("*"))]
        return {str(path): path.read_bytes() if path.is_file() else b"" for path in paths}


def check_refused(done: Outcome) -> None:
    """A command's refusal: not code 0, no output, one line that begins with the program's name."""
    assert done.code != 0
    assert done.stdout == ""
    assert done.stderr.startswith("zslurm: ")
    assert done.stderr.count("\n") == 1, done.stderr
    assert done.stderr.endswith("\n")


def fresh_python(code: str, *arguments: str, cwd: Path | None = None) -> Outcome:
    """Run Python code in a new interpreter."""
    return _finish([sys.executable, "-c", code, *arguments], cwd)


def fresh_zslurm(*arguments: str | Path, cwd: Path | None = None, **variables: str) -> Outcome:
    """`python -m zslurm` in a new interpreter."""
    return _finish([sys.executable, "-m", "zslurm", *map(str, arguments)], cwd, **variables)


def separate_zslurm(*arguments: str | Path, cwd: Path, **variables: str) -> Outcome:
    """Run `zslurm` in a separate process, forked from one that has imported it."""
    environment = clean_environment() | variables
    done = forked.server().run([*map(str, arguments)], env=environment, cwd=cwd, timeout=DEADLINE_S)
    return Outcome(done.returncode, done.stdout, done.stderr)


def _finish(command: list[str], cwd: Path | None, **variables: str) -> Outcome:
    environment = clean_environment() | {"PYTHONPATH": os.pathsep.join(sys.path)} | variables
    done = subprocess.run(
        command, cwd=cwd, env=environment, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=120
    )
    return Outcome(done.returncode, done.stdout, done.stderr)
