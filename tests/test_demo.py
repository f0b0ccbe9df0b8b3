"""`make demo`'s own program, as short as it may be: real text, two ranks, an interruption, a loss that falls."""

from __future__ import annotations

import json
import os
import re
import statistics
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest

from tests import forked
from tests.processors import OTHER_PROCESSORS
from zslurm.cli.demo import FEWEST_TOKENS, LEARNED_BY
from zslurm.train.jsonl import read_jsonl


def _demo(
    directory: Path, *arguments: str, before: Sequence[str] = (), environment: Mapping[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*before, sys.executable, "-m", "zslurm", "demo", *arguments],
        cwd=directory, env={**os.environ, "PYTHONSAFEPATH": "1", **(environment or {})}, capture_output=True,
        text=True, timeout=570, check=False,
    )  # fmt: skip


def test_the_smallest_demo_trains_is_interrupted_continues_and_learns(tmp_path: Path) -> None:
    """As on the slowest machine: the fewest tokens that the option allows, and that the demo chooses by itself."""
    forks = forked.environment(forked.server(torch=True), [*forked.RANKS, *forked.OTHERS])
    done = _demo(tmp_path, "--tokens", str(FEWEST_TOKENS), environment=forks)
    assert done.returncode == 0, done.stdout + done.stderr
    said = " ".join(done.stderr.split())
    assert "submit again to continue" in said
    assert "continued demo as job local-2" in said
    steps = [row for row in read_jsonl(tmp_path / "demo/runs/demo/metrics.jsonl") if row["kind"] == "step"]
    assert [row["step"] for row in steps] == list(range(1, 50)), "no step was lost or repeated"
    assert {row["attempt"] for row in steps} == {1, 2}
    entropy = float(re.search(r"unigram entropy of the tokens: ([\d.]+)", said)[1])  # type: ignore[index]
    assert statistics.mean(row["loss"] for row in steps[-10:]) < entropy - LEARNED_BY
    assert "49 steps in 2 attempts" in done.stdout


@pytest.mark.soak
def test_without_an_option_it_chooses_what_a_slow_machine_can_do_with_texts_of_ones_own(tmp_path: Path) -> None:
    """One core, and the oldest instructions that torch's libraries know."""
    core = min(os.sched_getaffinity(0))
    texts = str(Path(json.__file__).parent)
    done = _demo(
        tmp_path, texts, before=["taskset", "--cpu-list", str(core)], environment=OTHER_PROCESSORS["sse4"]
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "measured: this machine trains about" in done.stderr
    assert "in 2 attempts" in done.stdout


def test_one_token_less_than_the_fewest_is_refused(tmp_path: Path) -> None:
    done = _demo(tmp_path, "--tokens", str(FEWEST_TOKENS - 1))
    assert (done.returncode, list(tmp_path.iterdir())) == (2, [])
    assert str(FEWEST_TOKENS) in done.stderr.replace(",", "")


def test_texts_that_are_not_there_are_named_and_nothing_is_made(tmp_path: Path) -> None:
    done = _demo(tmp_path, "nowhere")
    assert (done.returncode, list(tmp_path.iterdir())) == (3, [])
    assert "nowhere: there is no such file or directory" in done.stderr


def test_it_does_not_touch_a_directory_that_is_not_its_own(tmp_path: Path) -> None:
    (tmp_path / "demo").mkdir()
    (tmp_path / "demo" / "thesis.txt").write_text("years of work")
    done = _demo(tmp_path)
    assert done.returncode == 2
    assert "was not made by the demo" in done.stderr
    assert (tmp_path / "demo" / "thesis.txt").read_text() == "years of work"
