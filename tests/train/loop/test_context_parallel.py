"""Runs whose phases divide their sequences over ranks: the same curve, also across resumes at other sizes."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from tests.train.ranks import train_on
from tests.train.runs import MODEL, losses_of, make_corpus, steps_of
from zslurm.train.jsonl import read_jsonl

CURVE = 1e-7
STEPS = 6
SHORT = {"tokens": 3 * 6 * 16, "context": 16, "global_batch": 6, "micro_batch": 1, "lr": 1e-2}
LONG = {"tokens": 3 * 4 * 30, "context": 30, "global_batch": 4, "micro_batch": 2, "lr": 1e-2, "rope_base": 1e5}


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_corpus(tmp_path_factory.mktemp("data") / "tokens.h5")


def make(directory: Path, corpus: Path, context_parallel: int, **parallel: Any) -> Path:
    config = {
        "run": {"name": "tiny", "seed": 3},
        "model": MODEL,
        "data": {"path": str(corpus), "isolate_documents": True},
        "phases": [SHORT, LONG | {"context_parallel": context_parallel}],
        "parallel": {"dtype": "fp64", "threads": 1} | parallel,
        "checkpoint": {"every_steps": 1, "keep_last": 50, "background": False},
        "evaluation": {"data": str(corpus), "every_steps": 5, "sequences": 5},
    }
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "config.json").write_text(json.dumps(config))
    return directory


def validation_losses(run: Path) -> list[float]:
    return [row["loss"] for row in read_jsonl(run / "metrics.jsonl") if row["kind"] == "evaluation"]


@pytest.fixture(scope="module")
def alone(corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    run = make(tmp_path_factory.mktemp("runs") / "alone", corpus, 1)
    done = train_on(run, 1)
    assert done.returncode == 0, done.stderr
    assert len(losses_of(run)) == STEPS
    return run


@pytest.mark.parametrize(("ranks", "context_parallel", "attention"), [(2, 2, "ring"), (4, 2, "all_gather")])
def test_a_phase_that_divides_its_sequences_follows_the_same_curve(
    alone: Path, corpus: Path, tmp_path: Path, ranks: int, context_parallel: int, attention: str
) -> None:
    run = make(tmp_path / "run", corpus, context_parallel, context_attention=attention)
    done = train_on(run, ranks)
    assert done.returncode == 0, done.stderr
    assert losses_of(run) == pytest.approx(losses_of(alone), rel=CURVE)
    assert any(step["time_split_s"]["gather"] > 0 for step in steps_of(run)), "weights of other ranks"
    assert validation_losses(run) == pytest.approx(validation_losses(alone), rel=CURVE)


@pytest.mark.soak
@pytest.mark.parametrize("attention", ["ring", "all_gather"])
def test_fifty_steps_of_shared_sequences_follow_one_curve(corpus: Path, tmp_path: Path, attention: str) -> None:
    losses = []
    for ranks in (1, 2):
        run = make(tmp_path / f"on-{ranks}", corpus, ranks, context_attention=attention)
        config = json.loads((run / "config.json").read_text())
        config["phases"] = [LONG | {"tokens": 50 * 4 * 30, "context_parallel": ranks}]
        (run / "config.json").write_text(json.dumps(config))
        done = train_on(run, ranks)
        assert done.returncode == 0, done.stderr
        losses.append(losses_of(run))
    assert len(losses[0]) == 50
    assert losses[1] == pytest.approx(losses[0], rel=CURVE)


def test_a_checkpoint_moves_between_sizes_of_both_kinds(alone: Path, corpus: Path, tmp_path: Path) -> None:
    """Of a step of the divided phase: from one rank to two that share sequences, and on to two that do not."""
    checkpoints = tmp_path / "run" / "checkpoints"
    run = make(tmp_path / "run", corpus, 2)
    shutil.copytree(alone / "checkpoints" / "step-00000004", checkpoints / "step-00000004")
    assert train_on(run, 2).returncode == 0
    assert losses_of(run)[-2:] == pytest.approx(losses_of(alone)[-2:], rel=CURVE)

    shutil.rmtree(checkpoints / "step-00000006")
    make(run, corpus, 1)
    assert train_on(run, 2).returncode == 0
    assert losses_of(run)[-1] == pytest.approx(losses_of(alone)[-1], rel=CURVE)


def test_sizes_that_do_not_divide_the_ranks_are_refused(corpus: Path, tmp_path: Path) -> None:
    done = train_on(make(tmp_path / "run", corpus, 2), 1)
    assert done.returncode == 2
    assert "phases[1].context_parallel" in done.stderr
    assert "Traceback" not in done.stderr


def test_a_context_too_short_to_divide_is_refused(corpus: Path, tmp_path: Path) -> None:
    run = make(tmp_path / "run", corpus, 2)
    config = json.loads((run / "config.json").read_text())
    config["phases"][1] |= {"context": 3, "tokens": 36}
    (run / "config.json").write_text(json.dumps(config))
    done = train_on(run, 2)
    assert done.returncode == 2
    assert "phases[1].context_parallel: 2 cuts a sequence into 4 chunks" in done.stderr
    assert not (run / "metrics.jsonl").exists(), "before the first phase"
    assert "Traceback" not in done.stderr
