"""Phases in real runs: batch ramps, re-warming, and resuming anywhere, also on other numbers of ranks."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from tests.train.ranks import train_on
from tests.train.runs import MODEL, losses_of, make_corpus, steps_of

FIRST = {
    "name": "first",
    "tokens": 16 * (3 + 3 + 3 + 6 + 6),
    "context": 16,
    "global_batch": 6,
    "micro_batch": 1,
    "batch_ramp": [{"until_tokens": 16 * 9, "global_batch": 3}],
    "lr": 3e-3,
    "final_lr": 1e-3,
    "warmup_steps": 2,
}
SECOND = {
    "name": "second",
    "tokens": 24 * 6 * 4,
    "context": 24,
    "global_batch": 6,
    "micro_batch": 2,
    "lr": 2e-3,
    "warmup_steps": 2,
    "warmup_from": 1e-3,
    "schedule": "wsd",
    "decay_steps": 2,
}
BATCHES = [3, 3, 3, 6, 6, 6, 6, 6, 6]
CONTEXTS = [16, 16, 16, 16, 16, 24, 24, 24, 24]


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_corpus(tmp_path_factory.mktemp("data") / "tokens.h5")


def make(directory: Path, corpus: Path, *phases: dict[str, Any]) -> Path:
    config = {
        "run": {"name": "tiny", "seed": 3},
        "model": MODEL,
        "data": {"path": str(corpus)},
        "phases": phases,
        "parallel": {"dtype": "fp32", "threads": 1},
        "checkpoint": {"every_steps": 1, "keep_last": 50, "background": False},
    }
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "config.json").write_text(json.dumps(config))
    return directory


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory, corpus: Path) -> Path:
    """Both phases on two ranks, saved after every step."""
    run = make(tmp_path_factory.mktemp("runs") / "whole", corpus, FIRST, SECOND)
    done = train_on(run, 2)
    assert done.returncode == 0, done.stderr
    return run


def as_after(whole: Path, step: int, target: Path) -> Path:
    """A copy of the run as it was after `step`."""
    target.mkdir()
    shutil.copy(whole / "config.json", target)
    name = f"step-{step:08d}"
    shutil.copytree(whole / "checkpoints" / name, target / "checkpoints" / name)
    return target


def test_a_run_moves_through_ramp_and_phases_by_itself(whole: Path) -> None:
    rows = steps_of(whole)
    assert [row["phase"] for row in rows] == ["first"] * 5 + ["second"] * 4
    tokens = [batch * context for batch, context in zip(BATCHES, CONTEXTS, strict=True)]
    assert [row["tokens"] for row in rows] == [sum(tokens[: step + 1]) for step in range(9)]
    rates = [1.5e-3, 3e-3, 3e-3, 2e-3, 1e-3, 1.5e-3, 2e-3, 2e-3 * (1 - 0.5**0.5), 0.0]
    assert [row["lr"] for row in rows] == pytest.approx(rates, abs=1e-12)


# 1: in warm-up and ramp; 2: in the ramp; 3: where the ramp ends; 5: between the phases; 6: in the re-warm
@pytest.mark.parametrize(
    "step", [pytest.param(1, marks=pytest.mark.soak), 2, pytest.param(3, marks=pytest.mark.soak), 5, 6]
)
def test_a_resume_is_bit_exact(whole: Path, tmp_path: Path, step: int) -> None:
    resumed = as_after(whole, step, tmp_path / "run")
    done = train_on(resumed, 2)
    assert done.returncode == 0, done.stderr
    keys = ("step", "tokens", "phase", "loss", "lr", "grad_norm")
    ours, theirs = ([[row[key] for key in keys] for row in steps_of(run)] for run in (resumed, whole))
    assert ours == theirs[step:]
    for shard in (whole / "checkpoints" / "step-00000009").glob("shard-*"):
        assert (resumed / "checkpoints" / "step-00000009" / shard.name).read_bytes() == shard.read_bytes()


def test_another_number_of_ranks_goes_on_where_it_was(whole: Path, tmp_path: Path) -> None:
    step = 2
    resumed = as_after(whole, step, tmp_path / "run")
    done = train_on(resumed, 3)
    assert done.returncode == 0, done.stderr
    assert [row["tokens"] for row in steps_of(resumed)] == [row["tokens"] for row in steps_of(whole)][step:]
    assert [row["lr"] for row in steps_of(resumed)] == [row["lr"] for row in steps_of(whole)][step:]
    assert losses_of(resumed)[0] == pytest.approx(losses_of(whole)[step], rel=1e-5)
    assert losses_of(resumed) == pytest.approx(losses_of(whole)[step:], rel=1e-2)


def test_a_change_of_later_phases_is_reported(whole: Path, tmp_path: Path, corpus: Path) -> None:
    resumed = as_after(whole, 5, tmp_path / "run")
    make(resumed, corpus, FIRST, SECOND | {"tokens": 24 * 6 * 5})
    done = train_on(resumed, 1)
    assert done.returncode == 0, done.stderr
    assert "note: phases[1] (second) now has 5 steps, and had 4" in done.stdout.splitlines()
    assert steps_of(resumed)[-1]["step"] == 10


def test_a_change_of_what_is_done_is_refused(whole: Path, tmp_path: Path, corpus: Path) -> None:
    resumed = as_after(whole, 6, tmp_path / "run")
    make(resumed, corpus, FIRST | {"batch_ramp": []}, SECOND)
    done = train_on(resumed, 2)
    assert done.returncode == 2
    assert done.stderr.count("error: phases[0] (first) now has 4 steps, and had 5, and the 6 steps that are ") == 2
    assert "Traceback" not in done.stderr
    assert steps_of(resumed) == []


def test_ranks_without_work_are_reported_and_ranks_without_sequences_refused(tmp_path: Path, corpus: Path) -> None:
    run = make(tmp_path / "run", corpus, FIRST | {"batch_ramp": [], "micro_batch": 3, "tokens": 16 * 6 * 2})
    done = train_on(run, 4)
    assert done.returncode == 0, done.stderr
    assert (
        "note: phases[0].global_batch (6) gives 4 data-parallel ranks at most 2 sequences each and 1.5 in the "
        "mean: they wait for 25 % of the time; a multiple of 4 divides evenly"
    ) in done.stdout.splitlines()
    make(run, corpus, FIRST)
    done = train_on(run, 4)
    assert done.returncode == 2
    assert (
        "phases[0].batch_ramp[0].global_batch (3) has fewer sequences than there are data-parallel ranks (4)"
        in done.stderr
    )
