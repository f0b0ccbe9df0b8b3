"""The command line, called as the installed program calls it, in this process."""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from zslurm.cli.main import main


@dataclass(frozen=True)
class Done:
    """How a command ended."""

    code: int
    out: str
    err: str

    @property
    def json(self) -> Any:
        return json.loads(self.out)


class Zslurm:
    """Runs commands; `ok` also checks that they worked."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
        self._monkeypatch, self._capsys = monkeypatch, capsys

    def __call__(self, *arguments: str | Path) -> Done:
        self._monkeypatch.setattr(sys, "argv", ["zslurm", *map(str, arguments)])
        self._capsys.readouterr()
        with pytest.raises(SystemExit) as ended:
            main()
        said = self._capsys.readouterr()
        return Done(int(ended.value.code or 0), said.out, said.err)

    def ok(self, *arguments: str | Path) -> Done:
        done = self(*arguments)
        assert done.code == 0, done.err
        return done
