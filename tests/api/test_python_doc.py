"""The blocks of docs/python.md run, in their order, in one program."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import zslurm
from tests.api.test_run import QUICK
from tests.checkout import ROOT
from tests.checkpoint_tools.saves import save
from tests.programs import TOY
from tests.submit.local_runs import LocalUser
from zslurm.config import yaml12

PAGE = ROOT / "docs" / "python.md"


@pytest.fixture
def user(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[LocalUser]:
    person = LocalUser(tmp_path)
    for name, value in person.environment.items():
        monkeypatch.setenv(name, value)
    monkeypatch.chdir(tmp_path)
    yield person
    person.close()


def test_the_page_runs_from_top_to_bottom(user: LocalUser, capsys: pytest.CaptureFixture[str]) -> None:
    program = [sys.executable, str(TOY), "12"]
    text = f"run: {{name: first}}\ntrainer: {{command: {program}, steps: 12}}\naegis: {QUICK}\n"
    assert yaml12.parse(text, "run.yaml").data["run"] == {"name": "first"}
    (user.directory / "run.yaml").write_text(text)
    (user.directory / "slurm-4242.out").write_text("[rank3]: torch.OutOfMemoryError: HIP out of memory. Tried\n")
    blocks = re.findall(r"^```python api\n(.*?)^```$", PAGE.read_text(), re.MULTILINE | re.DOTALL)
    assert len(blocks) == 7
    names: dict[str, Any] = {}
    for block in blocks:
        if "Checkpoint.open" in block:  # the program of this test saves nothing of zslurm's format
            root = user.directory / "runs" / "first" / "checkpoints"
            root.mkdir(parents=True, exist_ok=True)
            save(root, 400)
        exec(block, names)
    assert names["state"].state == "completed"
    assert len(names["losses"]) == len(names["frame"])
    assert names["smaller"].manifest.world_size == 1
    printed = capsys.readouterr().out
    assert "gpu_oom 3 " in printed
    assert "did you mean `first`?" in printed


def test_the_table_of_errors_names_what_there_is() -> None:
    rows = re.findall(r"^\| `(\w+)` \|", PAGE.read_text(), re.MULTILINE)
    kinds = {
        name
        for name in zslurm.__all__
        if isinstance(value := getattr(zslurm, name), type) and issubclass(value, Exception)
    }
    assert set(rows) == kinds - {"Error"}
