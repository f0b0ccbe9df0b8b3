"""Trackers: every number is there, a resumed run continues, and no tracker stalls or ends a run."""

from __future__ import annotations

import importlib.util
import logging
import math
import os
import sqlite3
import threading
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from tests.train.ranks import train_on
from tests.train.runs import losses_of, make_corpus, make_run
from tests.waiting import wait_for
from zslurm.train.config import TrainConfig, load_train_config
from zslurm.train.errors import ConfigError
from zslurm.train.parallel.world import open_world
from zslurm.train.setup import open_trainer
from zslurm.train.stop import StopRequest
from zslurm.train.telemetry.trackers.feed import TRACKERS, Feed, Trackers
from zslurm.train.telemetry.trackers.mlflow import MLflow
from zslurm.train.telemetry.trackers.prometheus import Prometheus
from zslurm.train.telemetry.trackers.tensorboard import TensorBoard
from zslurm.train.telemetry.trackers.tracker import TrackedRun, Tracker, scalars
from zslurm.train.telemetry.trackers.trackio import Trackio
from zslurm.train.telemetry.trackers.wandb import Wandb


def needs(package: str) -> pytest.MarkDecorator:
    """A test of the real package: an extra that `make setup` does not install, and .ci/run does."""
    return pytest.mark.skipif(_lacks(package), reason=f"needs the {package} package, which .ci/run installs")


def _lacks(package: str) -> bool:
    """Whether a package is missing; in CI it has to be there."""
    return importlib.util.find_spec(package) is None and os.environ.get("CI", "").lower() != "true"


def run_at(directory: Path, *, attempt: int = 1, first_step: int = 1, online: bool = False) -> TrackedRun:
    config = {"optim": {"clip_norm": 1.0}, "run": {"name": "tiny"}}
    return TrackedRun(directory, "tiny", "tests", config, attempt, first_step, online)


class Spy(Tracker):
    """A tracker whose service is a list."""

    KEY, PACKAGE, EXTRA = "wandb", "wandb", "wandb"
    lines: list[tuple[int, Mapping[str, float]]]
    threads: set[int]

    def __init__(self, run: TrackedRun) -> None:
        pass

    def log(self, step: int, values: Mapping[str, float]) -> None:
        type(self).lines.append((step, values))
        type(self).threads.add(threading.get_ident())

    def finish(self) -> None:
        type(self).lines.append((-1, {}))


@pytest.fixture
def spy() -> type[Spy]:
    return type("Fresh", (Spy,), {"lines": [], "threads": set()})


@pytest.fixture
def heard(caplog: pytest.LogCaptureFixture) -> Iterator[pytest.LogCaptureFixture]:
    """What the trackers log, at every level."""
    with caplog.at_level(logging.INFO, logger="zslurm.train"):
        yield caplog


def test_every_number_of_a_line_has_a_tag() -> None:
    fields: dict[str, Any] = {"loss": 2.5, "mfu": None, "phase": "train", "parts": {"data": 0.25}}
    found = dict(scalars("step", fields | {"load_shares": [[0.5]], "flag": True, "memory": 7}))
    assert found == {"step/loss": 2.5, "step/parts/data": 0.25, "step/memory": 7}


def test_lines_arrive_in_order_from_another_thread(tmp_path: Path, spy: type[Spy]) -> None:
    trackers = Trackers(run_at(tmp_path), {spy: False})
    for step in range(1, 4):
        trackers.recorded("step", {"step": step, "loss": float(step)})
    trackers.recorded("skipped", {"reason": "no step in it"})
    trackers.finish(lambda: False)
    assert spy.lines == [(1, {"step/loss": 1.0}), (2, {"step/loss": 2.0}), (3, {"step/loss": 3.0}), (-1, {})]
    assert threading.get_ident() not in spy.threads


@pytest.mark.parametrize("where", ["__init__", "log", "finish"])
@pytest.mark.parametrize(
    "error", [OSError(28, "No space left on device"), PermissionError("no credentials"), SystemExit(1)]
)
def test_what_goes_wrong_is_one_line_and_the_others_go_on(
    tmp_path: Path, spy: type[Spy], heard: pytest.LogCaptureFixture, where: str, error: BaseException
) -> None:
    def fails(*_: object) -> None:
        raise error

    broken = type("Broken", (Spy,), {"KEY": "mlflow", "lines": [], "threads": set(), where: fails})
    trackers = Trackers(run_at(tmp_path), {broken: False, spy: False})
    for step in range(1, 100):
        trackers.recorded("step", {"step": step, "loss": 1.0})
    trackers.finish(lambda: False)
    assert len(spy.lines) == 100
    (line,) = [record.getMessage() for record in heard.records]
    assert line.startswith("metrics.mlflow is off from here on: ")
    assert "\n" not in line


def test_a_tracker_that_hangs_neither_stalls_the_loop_nor_the_end(
    tmp_path: Path, heard: pytest.LogCaptureFixture
) -> None:
    hold = threading.Event()
    hanging = type("Hanging", (Spy,), {"__init__": lambda *_: hold.wait() and None, "lines": [], "threads": set()})
    feed = Feed(hanging, run_at(tmp_path), longest=3)
    for step in range(10):
        feed.put(step, {"step/loss": 1.0})
    feed.close()
    feed.wait(lambda: True)
    hold.set()
    lines = [record.getMessage() for record in heard.records]
    assert lines[0] == "metrics.wandb: it does not keep up; lines are left out from step 3 on"
    assert "metrics.wandb: 7 lines were left out" in lines
    assert any("did not end in time" in line for line in lines)
    wait_for(lambda: not feed._thread.is_alive(), "the thread's end")


@pytest.mark.parametrize("kind", TRACKERS)
def test_without_the_package_one_line_names_the_extra(
    kind: type[Tracker], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = make_run(tmp_path / "run", tmp_path / "tokens.h5", metrics={kind.KEY: _on(kind)})
    config: TrainConfig = load_train_config(run / "config.json")
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=rf"^metrics\.{kind.KEY}: .* pip install 'zslurm-train\[{kind.EXTRA}\]'"):
        Trackers.check(config)
    off = make_run(tmp_path / "off", tmp_path / "tokens.h5")
    Trackers.check(load_train_config(off / "config.json"))


def _on(kind: type[Tracker]) -> object:
    return True if kind is TensorBoard else "offline"


def test_the_identity_is_the_same_in_every_attempt_and_another_in_another_run(tmp_path: Path) -> None:
    again = run_at(tmp_path, attempt=2)
    assert run_at(tmp_path).identity == again.identity != run_at(tmp_path / "other").identity


def shown_by_tensorboard(directory: Path) -> dict[str, dict[int, float]]:
    """What TensorBoard shows: by tag, the value of every step."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    shown = EventAccumulator(str(directory), size_guidance={"scalars": 0})
    shown.Reload()
    return {tag: {event.step: event.value for event in shown.Scalars(tag)} for tag in shown.Tags()["scalars"]}


def exporting(directory: Path, target: Path) -> TrackedRun:
    return replace(run_at(directory), config={"metrics": {"prometheus": str(target)}})


def exported(file: Path) -> dict[str, float]:
    """The values of a file, as Prometheus' own parser reads them; every one has the labels of the run."""
    samples = [sample for family in text_string_to_metric_families(file.read_text()) for sample in family.samples]
    assert all(sample.labels == {"run": "tiny", "project": "tests"} for sample in samples)
    return {sample.name: sample.value for sample in samples}


def test_prometheus_gets_the_newest_numbers_as_long_as_the_run_trains(tmp_path: Path) -> None:
    tracker = Prometheus(exporting(tmp_path, tmp_path))
    tracker.log(1, {"step/loss": 4.5, "step/time_split_s/forward": 0.25})
    tracker.log(2, {"step/loss": math.nan})
    found = exported(tmp_path / "zslurm-tiny.prom")
    assert math.isnan(found.pop("zslurm_step_loss"))
    assert found == {"zslurm_step": 2, "zslurm_step_time_split_s_forward": 0.25}
    tracker.finish()
    assert list(tmp_path.iterdir()) == []


def test_prometheus_writes_the_file_that_is_named_and_no_other_directory(tmp_path: Path) -> None:
    Prometheus(exporting(tmp_path, tmp_path / "mine.prom")).log(7, {})
    assert exported(tmp_path / "mine.prom") == {"zslurm_step": 7}
    with pytest.raises(FileNotFoundError, match="nowhere: there is no such directory"):
        Prometheus(exporting(tmp_path, tmp_path / "nowhere" / "mine.prom"))


def test_prometheus_sees_a_run_until_it_ends(tmp_path: Path) -> None:
    corpus = make_corpus(tmp_path / "tokens.h5")
    run = make_run(tmp_path / "run", corpus, steps=3, metrics={"prometheus": str(tmp_path / "run.prom")})
    config = load_train_config(run / "config.json")
    with open_world(config.parallel) as world:
        trainer = open_trainer(run, config, world, StopRequest())
        trainer.run()
    wait_for(lambda: " 3.0" in (tmp_path / "run.prom").read_text(), "the last step")
    trainer.observers.finish(give_up=lambda: False)
    assert not (tmp_path / "run.prom").exists()


@needs("tensorboard")
def test_tensorboard_goes_on_after_a_restart_and_repeats_no_step(tmp_path: Path) -> None:
    """Steps 3 and 4 of the first attempt were lost with it: its values of them are forgotten."""
    for attempt, steps in ((1, range(1, 5)), (2, range(3, 6))):
        board = TensorBoard(run_at(tmp_path, attempt=attempt, first_step=steps[0]))
        for step in steps:
            board.log(step, {"step/loss": 10.0 * attempt + step})
        board.finish()
    assert len(list((tmp_path / "tensorboard").iterdir())) == 2
    assert shown_by_tensorboard(tmp_path / "tensorboard")["step/loss"] == {1: 11, 2: 12, 3: 23, 4: 24, 5: 25}


@needs("tensorboard")
def test_a_run_shows_what_metrics_jsonl_has(tmp_path: Path) -> None:
    corpus = make_corpus(tmp_path / "tokens.h5")
    run = make_run(tmp_path / "run", corpus, steps=4, metrics={"tensorboard": True})
    done = train_on(run, ranks=2)
    assert done.returncode == 0, done.stderr
    shown = shown_by_tensorboard(run / "tensorboard")
    assert list(shown["step/loss"].values()) == pytest.approx(losses_of(run))
    assert {"step/grad_norm", "step/lr", "step/tokens_per_s", "step/time_split_s/forward"} <= set(shown)
    assert all(math.isfinite(value) for values in shown.values() for value in values.values())


def two_attempts(kind: type[Tracker], directory: Path) -> None:
    """Log steps 1 to 3, and 3 to 4 in a second attempt."""
    for attempt, steps in ((1, (1, 2, 3)), (2, (3, 4))):
        tracker = kind(run_at(directory, attempt=attempt, first_step=steps[0]))
        for step in steps:
            tracker.log(step, {"step/loss": 1.0 / step})
        tracker.finish()


@needs("mlflow")
def test_mlflow_offline_has_one_run_with_every_step(tmp_path: Path) -> None:
    two_attempts(MLflow, tmp_path)
    with sqlite3.connect(tmp_path / "mlflow.db") as database:
        ((runs,),) = database.execute("select count(*) from runs")
        steps = [row[0] for row in database.execute("select distinct step from metrics where key = 'step/loss'")]
        parameters = dict(database.execute("select key, value from params"))
    assert runs == 1
    assert sorted(steps) == [1, 2, 3, 4]
    assert parameters == {"optim/clip_norm": "1.0"}


@needs("wandb")
def test_wandb_offline_writes_each_attempt_under_one_id(tmp_path: Path) -> None:
    two_attempts(Wandb, tmp_path)
    folders = sorted(path.name for path in (tmp_path / "wandb").glob("offline-run-*"))
    assert len(folders) == 2
    assert {folder.rpartition("-")[2] for folder in folders} == {run_at(tmp_path).identity}
    assert all(list((tmp_path / "wandb" / folder).glob("*.wandb")) for folder in folders)


@needs("trackio")
def test_trackio_offline_has_one_run_with_every_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRACKIO_DIR", str(tmp_path / "trackio"))
    two_attempts(Trackio, tmp_path)
    (database,) = (tmp_path / "trackio").glob("*.db")
    with sqlite3.connect(database) as found:
        rows = found.execute("select run_name, step from metrics").fetchall()
    assert {name for name, _ in rows} == {"tiny"}
    assert {step for _, step in rows} == {1, 2, 3, 4}


@needs("wandb")
def test_wandb_online_without_credentials_is_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, heard: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("WANDB_API_KEY", raising=False)
    trackers = Trackers(run_at(tmp_path), {Wandb: True}, finish_s=60)
    trackers.recorded("step", {"step": 1, "loss": 1.0})
    trackers.finish(lambda: False)
    lines = [record.getMessage() for record in heard.records if record.name.startswith("zslurm")]
    assert len(lines) == 1 and lines[0].startswith("metrics.wandb"), lines


@pytest.mark.parametrize(("kind", "variable"), [(MLflow, "MLFLOW_TRACKING_URI"), (Trackio, "TRACKIO_SPACE_ID")])
def test_online_without_an_address_is_one_line(
    kind: type[Tracker], variable: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if _lacks(kind.PACKAGE) and kind is MLflow:
        pytest.skip("needs the mlflow package, which .ci/run installs")
    monkeypatch.delenv(variable, raising=False)
    with pytest.raises(ValueError, match=f"^{variable} is not set$"):
        kind(run_at(tmp_path, online=True))
