"""A training step waits for the device in one place: where it reads the loss, the norm and the counts together."""

from __future__ import annotations

import sys
import warnings
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

import zslurm.train.loop as loop
from tests.train.runs import make_corpus, make_run
from zslurm.train.config import load_train_config
from zslurm.train.parallel.world import open_world
from zslurm.train.schedule import Position
from zslurm.train.setup import open_trainer
from zslurm.train.stop import StopRequest
from zslurm.train.telemetry.observer import StepResult

READS = ("item", "tolist", "cpu", "numpy", "__bool__", "__float__", "__int__", "__index__")
"""Methods of a tensor that wait for its device."""

OPERATORS = {"_local_scalar_dense", "nonzero", "is_nonzero", "equal", "masked_select", "_unique2", "bincount"}
"""Operators that do, however they are called."""

ON_A_CPU = ("kernels/grouped_gemm/", "kernels/matmul/")
"""The loop over experts, which a GPU does not take, and products of a CPU: what they read is on the host."""


def is_ours(path: str) -> bool:
    """Whether a source belongs to the trainer or its kernels."""
    return ("/train/" in path or "/kernels/" in path) and "/tests/" not in path


class Reads(TorchDispatchMode):
    """Records where tensors are read by the host, but for what was read back already."""

    def __init__(self) -> None:
        super().__init__()
        self.found: Counter[str] = Counter()
        self.host: set[int] = set()

    def note(self, what: str) -> None:
        frame = sys._getframe(2)
        while not is_ours(frame.f_code.co_filename) and frame.f_back is not None:
            frame = frame.f_back
        path = frame.f_code.co_filename
        if not any(part in path for part in ON_A_CPU):
            self.found[f"{Path(path).name}:{frame.f_code.co_name}:{what}"] += 1

    def __torch_dispatch__(
        self, function: Any, types: Any, arguments: tuple[Any, ...] = (), named: dict[str, Any] | None = None
    ) -> Any:
        name = function.overloadpacket.__name__
        if name in OPERATORS and not any(self.is_host(each) for each in arguments):
            self.note(name)
        return function(*arguments, **(named or {}))

    def is_host(self, value: object) -> bool:
        return isinstance(value, Tensor) and value.untyped_storage().data_ptr() in self.host


def watched(run: Path, monkeypatch: pytest.MonkeyPatch) -> list[Counter[str]]:
    """Train; returns what each step read, and how often."""
    steps: list[Counter[str]] = []
    current: list[Reads] = []

    def patch(name: str) -> None:
        original: Callable[..., Any] = getattr(Tensor, name)

        def read(tensor: Tensor, *arguments: Any, **named: Any) -> Any:
            if current and not current[-1].is_host(tensor):
                current[-1].note(name)
            return original(tensor, *arguments, **named)

        monkeypatch.setattr(Tensor, name, read)

    for name in READS:
        patch(name)
    read_back, train_step = loop.read_back, loop.Trainer.train_step

    def reads_back(*tensors: Tensor) -> list[Tensor]:
        found = read_back(*tensors)
        current[-1].host.update(each.untyped_storage().data_ptr() for each in found)
        return found

    def step(trainer: loop.Trainer, here: Position) -> StepResult:
        current.append(Reads())
        with current[-1]:
            result = train_step(trainer, here)
        steps.append(current.pop().found)
        return result

    monkeypatch.setattr(loop, "read_back", reads_back)
    monkeypatch.setattr(loop.Trainer, "train_step", step)
    train(run)
    return steps


def train(run: Path) -> None:
    config = load_train_config(run / "config.json")
    with open_world(config.parallel) as world:
        open_trainer(run, config, world, StopRequest()).run()


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_a_step_reads_the_device_in_one_place(dtype: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    corpus = make_corpus(tmp_path / "corpus.h5")
    run = make_run(tmp_path / "run", corpus, steps=3, parallel={"dtype": dtype, "device": "cpu"})
    assert watched(run, monkeypatch) == [Counter({"world.py:read_back:cpu": 1})] * 3


def test_another_read_would_be_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By any way: a method of a tensor, or an operator."""
    original = loop.balance_over

    def reads(*arguments: Any, **named: Any) -> Any:
        state = original(*arguments, **named)
        state.bias.sum().item()
        state.bias.nonzero()
        return state

    monkeypatch.setattr(loop, "balance_over", reads)
    monkeypatch.setattr(sys.modules[__name__], "ON_A_CPU", ())
    corpus = make_corpus(tmp_path / "corpus.h5")
    run = make_run(tmp_path / "run", corpus, steps=2, parallel={"dtype": "fp32", "device": "cpu"})
    names = {each.rpartition(":")[2] for found in watched(run, monkeypatch) for each in found}
    assert {"item", "nonzero"} <= names


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_a_gpu_waits_once_a_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Counted by torch itself; the first step may build and tune."""
    corpus = make_corpus(tmp_path / "corpus.h5")
    run = make_run(tmp_path / "run", corpus, steps=5, parallel={"dtype": "bf16", "device": "cuda"})
    waits: list[list[str]] = []
    train_step = loop.Trainer.train_step

    def step(trainer: loop.Trainer, here: Position) -> StepResult:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            torch.cuda.set_sync_debug_mode("warn")
            try:
                result = train_step(trainer, here)
            finally:
                torch.cuda.set_sync_debug_mode("default")
        waits.append([str(each.message) for each in caught if "synchroniz" in str(each.message)])
        return result

    monkeypatch.setattr(loop.Trainer, "train_step", step)
    train(run)
    assert [len(each) for each in waits[1:]] == [1] * 4, waits
