"""The metrics for TensorBoard: every number is there, a resumed run continues, a missing package is one line."""

from __future__ import annotations

import importlib.util
import math
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.train.ranks import train_on
from tests.train.runs import losses_of, make_corpus, make_run, train_alone
from zslurm.train.config import load_train_config
from zslurm.train.errors import ConfigError
from zslurm.train.telemetry.tensorboard import TensorBoard

needs_tensorboard = pytest.mark.skipif(
    importlib.util.find_spec("tensorboard") is None, reason="needs the tensorboard package"
)


def scalars_of(directory: Path) -> dict[str, dict[int, float]]:
    """What TensorBoard shows: by tag, the value of every step."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    shown = EventAccumulator(str(directory), size_guidance={"scalars": 0})
    shown.Reload()
    return {tag: {event.step: event.value for event in shown.Scalars(tag)} for tag in shown.Tags()["scalars"]}


@needs_tensorboard
def test_every_number_is_a_scalar(tmp_path: Path) -> None:
    board = TensorBoard(tmp_path, first_step=1, attempt=1)
    fields: dict[str, Any] = {"step": 3, "loss": 2.5, "mfu": None, "phase": "train", "parts": {"data": 0.25}}
    board.recorded("step", fields | {"load_shares": [[0.5]], "flag": True, "memory": 7})
    board.recorded("skipped", {"reason": "no step in it"})
    board.finish(lambda: False)
    assert scalars_of(tmp_path) == {"step/loss": {3: 2.5}, "step/parts/data": {3: 0.25}, "step/memory": {3: 7}}


@needs_tensorboard
def test_a_resumed_run_goes_on_and_repeats_no_step(tmp_path: Path) -> None:
    """Steps 3 and 4 of the first attempt were lost with it: its values of them are forgotten."""
    for attempt, steps in ((1, range(1, 5)), (2, range(3, 6))):
        board = TensorBoard(tmp_path, first_step=steps[0], attempt=attempt)
        for step in steps:
            board.recorded("step", {"step": step, "loss": 10.0 * attempt + step})
        board.finish(lambda: False)
    assert len(list(tmp_path.iterdir())) == 2
    assert scalars_of(tmp_path)["step/loss"] == {1: 11, 2: 12, 3: 23, 4: 24, 5: 25}


@needs_tensorboard
def test_a_run_shows_what_metrics_jsonl_says(tmp_path: Path) -> None:
    corpus = make_corpus(tmp_path / "tokens.h5")
    run = make_run(tmp_path / "run", corpus, steps=4, metrics={"tensorboard": True})
    done = train_on(run, ranks=2)
    assert done.returncode == 0, done.stderr
    shown = scalars_of(run / "tensorboard")
    assert list(shown["step/loss"].values()) == pytest.approx(losses_of(run))
    assert {"step/grad_norm", "step/lr", "step/tokens_per_s", "step/time_split_s/forward"} <= set(shown)
    assert all(math.isfinite(value) for values in shown.values() for value in values.values())


def test_without_the_package_one_line_reports_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = make_run(tmp_path / "run", tmp_path / "tokens.h5", metrics={"tensorboard": True})
    config = load_train_config(run / "config.json")
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"pip install 'zslurm\[tensorboard\]'"):
        TensorBoard.check(config)


@pytest.mark.skipif(importlib.util.find_spec("tensorboard") is not None, reason="the tensorboard package is here")
def test_a_run_without_the_package_is_refused_before_it_begins(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", make_corpus(tmp_path / "tokens.h5"), metrics={"tensorboard": True})
    done = train_alone(run)
    assert done.returncode == 2
    assert done.stderr.startswith("error: metrics.tensorboard: the tensorboard package is not installed")
    assert done.stderr.count("\n") == 1
    assert "tensorboard" not in sys.modules
