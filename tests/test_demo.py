"""`make demo`'s own program, shortened: real text, two ranks, an interruption, and a loss that falls."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

from train.jsonl import read_jsonl


def _demo(directory: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "zslurm", "demo", *arguments],
        cwd=directory, env=os.environ | {"PYTHONSAFEPATH": "1"}, capture_output=True, text=True, timeout=570,
        check=False,
    )  # fmt: skip


def test_the_demo_trains_is_interrupted_continues_and_learns(tmp_path: Path) -> None:
    done = _demo(tmp_path, "--tokens", "200000")
    assert done.returncode == 0, done.stdout + done.stderr
    said = " ".join(done.stderr.split())
    assert "submit again to continue" in said
    assert "continued demo as job local-2" in said
    steps = [row for row in read_jsonl(tmp_path / "demo/runs/demo/metrics.jsonl") if row["kind"] == "step"]
    assert [row["step"] for row in steps] == list(range(1, 50)), "no step was lost or repeated"
    assert {row["attempt"] for row in steps} == {1, 2}
    entropy = float(re.search(r"unigram entropy of the tokens: ([\d.]+)", said)[1])  # type: ignore[index]
    assert steps[-1]["loss"] < entropy - 0.3
    assert "49 steps in 2 attempts" in done.stdout


def test_it_does_not_touch_a_directory_that_is_not_its_own(tmp_path: Path) -> None:
    (tmp_path / "demo").mkdir()
    (tmp_path / "demo" / "thesis.txt").write_text("years of work")
    done = _demo(tmp_path)
    assert done.returncode == 2
    assert "was not made by the demo" in done.stderr
    assert (tmp_path / "demo" / "thesis.txt").read_text() == "years of work"
