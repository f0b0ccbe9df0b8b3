"""The protocol of what watches a run: a new observer is one class in a list, and sees everything in order."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, ClassVar, Self

import pytest

from tests.train.runs import make_corpus, make_run
from zslurm.checkpoint_tools import list_checkpoints
from zslurm.train.config import TrainConfig, load_train_config
from zslurm.train.errors import ConfigError
from zslurm.train.parallel.world import World, open_world
from zslurm.train.schedule import Position
from zslurm.train.setup import open_trainer
from zslurm.train.stop import StopRequest
from zslurm.train.telemetry import observers
from zslurm.train.telemetry.observer import ObservedRun, Observer, StepResult
from zslurm.train.telemetry.timing import StepPart


class Diary(Observer):
    """Writes down what it observes, and asks for a checkpoint after step 2."""

    entries: ClassVar[list[str]] = []

    def __init__(self) -> None:
        self._step = 0

    @staticmethod
    def check(config: TrainConfig) -> None:
        if config.run.name == "secret":
            raise ConfigError("run.name: a diary is kept of this run")

    @classmethod
    def create(cls, run: ObservedRun) -> Diary:
        return cls()

    def __enter__(self) -> Self:
        self.entries.append("enter")
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.entries.append("exit")

    def step_done(self, step: int, here: Position, result: StepResult, split: Mapping[StepPart, float]) -> None:
        self._step = step
        self.entries.append(f"done {step}")

    def recorded(self, kind: str, fields: Mapping[str, Any]) -> None:
        self.entries.append(f"{kind} {fields['step']} {fields.get('state', '')}".strip())

    def needs_checkpoint(self) -> bool:
        return self._step == 2

    def checkpoint_requested(self, step: int) -> None:
        self.entries.append(f"requested {step}")

    def checkpoint_committed(self, step: int, path: Path) -> None:
        self.entries.append(f"committed {step} {path.name}")

    def checkpoints_in_use(self) -> frozenset[int]:
        return frozenset({2})

    def finish(self, give_up: Callable[[], bool]) -> None:
        self.entries.append("finish")


@pytest.fixture(autouse=True)
def diary(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(observers, "OBSERVERS", (*observers.OBSERVERS, Diary))
    Diary.entries.clear()


@pytest.fixture
def world() -> Iterator[World]:
    with open_world(TrainConfig.model_fields["parallel"].get_default(call_default_factory=True)) as opened:
        yield opened


def saved(step: int) -> list[str]:
    states = [f"checkpoint {step} {state}" for state in ("REQUESTED", "STAGED", "WRITTEN", "COMMITTED")]
    return [f"requested {step}", *states, f"committed {step} step-{step:08d}"]


def test_a_new_observer_sees_everything_in_order_and_can_ask_for_a_checkpoint(
    tmp_path: Path, world: World
) -> None:
    checkpoint = {"every_steps": 100, "background": False, "keep_last": 1}
    run = make_run(tmp_path / "run", make_corpus(tmp_path / "tokens.h5"), steps=4, checkpoint=checkpoint)
    trainer = open_trainer(run, load_train_config(run / "config.json"), world, StopRequest())
    trainer.run()
    trainer.observers.finish(give_up=lambda: False)
    steps = {step: [f"step {step}", f"done {step}"] for step in range(1, 5)}
    steps[4].insert(1, "sources 4")
    assert Diary.entries[0] == "enter"
    assert Diary.entries[-2:] == ["exit", "finish"]
    seen = Diary.entries[1:-2]
    # The lines of a step are written by observers before this one in the list.
    assert seen == [*steps[1], *steps[2], *saved(2), *steps[3], *steps[4], *saved(4)]
    assert [found.step for found in list_checkpoints(run / "checkpoints")] == [4, 2], "2 is in use, and stays"


def test_an_observer_refuses_a_configuration_before_anything_is_built(tmp_path: Path, world: World) -> None:
    run = make_run(tmp_path / "run", tmp_path / "no-data-yet.h5", run={"name": "secret"})
    with pytest.raises(ConfigError, match="a diary"):
        open_trainer(run, load_train_config(run / "config.json"), world, StopRequest())
    assert Diary.entries == []
