"""The profiler's window: which steps it covers, and that a run leaves one trace of them."""

from __future__ import annotations

import gzip
import json
import logging
import signal
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from pydantic import ValidationError

from tests.train.ranks import asked_to_stop, train_on
from tests.train.runs import losses_of, make_corpus, make_run
from zslurm.train.sections.metrics_config import MetricsConfig
from zslurm.train.telemetry.profiler import Profiler

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_corpus(tmp_path_factory.mktemp("data") / "tokens.h5")


def events_of(trace: Path) -> list[dict[str, Any]]:
    with gzip.open(trace, "rt") as file:
        events: list[dict[str, Any]] = json.load(file)["traceEvents"]
    return events


def profiled(directory: Path, window: tuple[int, int], *, done: int, until: int) -> list[str]:
    """Train steps done + 1 to `until`, each one call of an operator with its number; what was traced."""
    with Profiler(window, done=done, directory=directory, device=CPU) as profile:
        for step in range(done + 1, until + 1):
            with torch.autograd.profiler.record_function(f"step {step}"):
                torch.ones(3).sum()
            profile.after_step()
    traces = sorted(directory.glob("*"))
    names = {event["name"] for trace in traces for event in events_of(trace)}
    return sorted(name for name in names if name.startswith("step "))


@pytest.fixture
def log(caplog: pytest.LogCaptureFixture) -> pytest.LogCaptureFixture:
    caplog.set_level(logging.INFO)
    return caplog


@pytest.mark.parametrize(
    ("window", "done", "until", "traced"),
    [
        ((3, 4), 0, 6, ["step 3", "step 4"]),
        ((1, 2), 0, 4, ["step 1", "step 2"]),
        ((2, 2), 0, 4, ["step 2"]),
        ((5, 6), 0, 6, ["step 5", "step 6"]),  # to the very end
        ((3, 5), 3, 8, ["step 4", "step 5"]),  # a resumed run in the middle of it
        ((3, 5), 0, 4, ["step 3", "step 4"]),  # asked to stop in the middle of it
    ],
)
def test_the_window_is_traced_and_nothing_else(
    tmp_path: Path,
    window: tuple[int, int],
    done: int,
    until: int,
    traced: list[str],
    log: pytest.LogCaptureFixture,
) -> None:
    assert profiled(tmp_path / "profile", window, done=done, until=until) == traced
    first, last = traced[0].removeprefix("step "), traced[-1].removeprefix("step ")
    (line,) = log.messages
    assert line.startswith(
        f"profiled steps {first} to {last} of rank 0: {tmp_path}/profile/steps-{first}-{last}.json.gz"
    )


def test_a_window_that_is_over_is_left_out_with_a_word(tmp_path: Path, log: pytest.LogCaptureFixture) -> None:
    assert profiled(tmp_path / "profile", (3, 5), done=7, until=9) == []
    assert log.messages == ["metrics.profile: steps 3 to 5 are done already; nothing is profiled"]
    assert not (tmp_path / "profile").exists()


@pytest.mark.parametrize("until", [1, 2])
def test_a_run_that_stops_before_its_window_leaves_nothing(
    tmp_path: Path, until: int, log: pytest.LogCaptureFixture
) -> None:
    assert profiled(tmp_path / "profile", (3, 5), done=0, until=until) == []
    assert log.messages == []


def test_a_run_that_fails_does_not_wait_for_a_trace(tmp_path: Path, log: pytest.LogCaptureFixture) -> None:
    with (
        pytest.raises(OSError),
        Profiler((1, 3), done=0, directory=tmp_path / "p", device=CPU) as profile,
    ):
        profile.after_step()
        raise OSError
    assert log.messages == []


def test_a_run_traces_rank_0_and_trains_the_same(tmp_path: Path, corpus: Path) -> None:
    runs = [
        make_run(tmp_path / name, corpus, steps=5, phase={"micro_batch": 3}, metrics=metrics)
        for name, metrics in (("plain", {}), ("profiled", {"profile": "3:4"}))
    ]
    for run in runs:
        done = train_on(run, ranks=2)
        assert done.returncode == 0, done.stderr
    assert losses_of(runs[0]) == losses_of(runs[1])
    (trace,) = (runs[1] / "profile").iterdir()
    assert trace.name == "steps-3-4.json.gz"
    assert f"profiled steps 3 to 4 of rank 0: {trace}" in done.stdout
    names = {event["name"] for event in events_of(trace)}
    assert "aten::mm" in names
    assert not (runs[0] / "profile").exists()


def test_a_stop_inside_of_the_window_still_ends_in_order(tmp_path: Path, corpus: Path) -> None:
    run = make_run(tmp_path / "run", corpus, steps=9, phase={"micro_batch": 6}, metrics={"profile": "3:8"})
    assert train_on(run, 1, partial(asked_to_stop, signal.SIGTERM, 5)).returncode == 75
    assert [trace.name for trace in (run / "profile").iterdir()] == ["steps-3-5.json.gz"]


@pytest.mark.parametrize(
    ("profile", "message"),
    [
        ("25:20", r"profile \(25:20\) must be FIRST:LAST with 1 <= FIRST <= LAST"),
        ("0:3", r"profile \(0:3\) must be FIRST:LAST with 1 <= FIRST <= LAST"),
        ("1:33", r"profile \(1:33\) covers 33 steps, more than 32"),
        ("a:b", r"profile \(a:b\) must be FIRST:LAST, two numbers of steps"),
        ("20", r"profile \(20\) must be FIRST:LAST, two numbers of steps"),
        ("1:2:3", r"profile \(1:2:3\) must be FIRST:LAST, two numbers of steps"),
    ],
)
def test_bad_windows_are_one_line(profile: str, message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        MetricsConfig(profile=profile)


def test_a_window_beyond_the_run_is_refused(tmp_path: Path, corpus: Path) -> None:
    run = make_run(tmp_path / "run", corpus, steps=5, metrics={"profile": "4:6"})
    done = train_on(run, ranks=1)
    assert done.returncode == 2
    assert done.stderr.count("\n") == 1
    assert "metrics.profile (4:6) ends after the last step, 5" in done.stderr
