"""`zslurm why`: any job's logs from files or a pipe, in words and as JSON."""

from __future__ import annotations

import io
import sys
from pathlib import Path

import pytest

from tests.cli.commands import Zslurm

STEP = """\
3: [2026-02-02 12:00:00,000] step 10 loss 2.1
3: [rank3]: Traceback (most recent call last):
3: [rank3]:   File "train.py", line 3, in <module>
3: [rank3]:     raise RuntimeError("error")
3: [rank3]: torch.OutOfMemoryError: HIP out of memory. Tried to allocate 3.31 GiB. GPU 3 has a total of 9 GiB
srun: error: node0: task 3: Exited with exit code 1
srun: error: node1: tasks 8-15: Killed
"""
KEYS = {"file", "number", "class", "role", "scope", "node", "gpu", "nic", "rank"}


@pytest.fixture
def zslurm(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Zslurm:
    return Zslurm(monkeypatch, capsys)


@pytest.fixture
def log(tmp_path: Path) -> Path:
    path = tmp_path / "slurm-1.out"
    path.write_text(STEP)
    return path


def test_as_json(zslurm: Zslurm, log: Path) -> None:
    reported = zslurm.ok("why", log, "--json").json
    assert all(set(line) >= KEYS for line in reported["lines"])
    assert [(line["number"], line["class"], line["role"]) for line in reported["lines"]] == [
        (5, "gpu_oom", "root"),
        (6, "teardown", "teardown"),
        (7, "teardown", "teardown"),
    ]
    assert reported["root"] == reported["lines"][0] | {"certain": True}
    assert reported["suspect"] == {"node": "node0", "gpu": "3", "nic": None, "rank": 3}
    assert reported["advice"].startswith("A GPU ran out of memory.")


def test_in_words(zslurm: Zslurm, log: Path) -> None:
    lines = zslurm.ok("why", log).stdout.splitlines()
    assert lines[0] == "root: gpu_oom: node node0, gpu 3, rank 3"
    assert lines[1].startswith(f"  {log}:5: torch.OutOfMemoryError: HIP out of memory.")
    assert lines[2].startswith("  A GPU ran out of memory.")
    header, *rows = [line.split("\t") for line in lines[4:]]
    assert header == ["time", "class", "role", "lines", "where", "first line"]
    assert [row[1:5] for row in rows] == [
        ["gpu_oom", "root", "1", "gpu 3; rank 3"],
        ["teardown", "teardown", "2", "node[0-1]; rank 3,8"],
    ]


def test_standard_input(zslurm: Zslurm, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(STEP.encode() + b"\xff\x00")))
    reported = zslurm.ok("why", "-", "--json").json
    assert (reported["root"]["file"], reported["root"]["class"]) == ("-", "gpu_oom")


def test_only_consequences(zslurm: Zslurm, tmp_path: Path) -> None:
    path = tmp_path / "log"
    path.write_text("srun: error: node1: tasks 8-15: Killed\n")
    assert zslurm.ok("why", path).stdout.startswith(
        "root: teardown (a consequence; its cause is not in these logs): node node1, rank 8\n"
    )


def test_a_directory(zslurm: Zslurm, tmp_path: Path) -> None:
    done = zslurm("why", tmp_path, tmp_path)
    assert (done.code, done.stderr) == (3, f"zslurm: {tmp_path}: is a directory; name the files in it\n")
