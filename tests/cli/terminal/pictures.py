"""What is on the screen: commands run as on a terminal of a given width, compared with files of text.

If output changes on purpose, `UPDATE_SNAPSHOTS=1 pytest tests/cli/terminal` writes the files again; read them.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from tests.cli.commands import Zslurm

SNAPSHOTS = Path(__file__).parent / "snapshots"


class Terminal:
    """Commands as on a terminal; without colours, unless asked for."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
        self._monkeypatch, self._zslurm, self._capsys = monkeypatch, Zslurm(monkeypatch, capsys), capsys

    def show(self, *arguments: str | Path, width: int, colour: bool = False) -> str:
        self._monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
        self._monkeypatch.setenv("COLUMNS", str(width))
        self._monkeypatch.setenv("TERM", "xterm-256color" if colour else "dumb")
        return self._zslurm(*arguments).stdout


def compare(name: str, text: str) -> None:
    """Compare text with a snapshot.

    Raises:
        AssertionError: it differs, or there is none.
    """
    path = SNAPSHOTS / f"{name}.txt"
    if os.environ.get("UPDATE_SNAPSHOTS"):
        path.parent.mkdir(exist_ok=True)
        path.write_text(text, encoding="utf-8")
    assert path.is_file(), f"{path.name}: no such snapshot; UPDATE_SNAPSHOTS=1 writes it"
    assert text == path.read_text(encoding="utf-8"), f"differs from {path.name}"
