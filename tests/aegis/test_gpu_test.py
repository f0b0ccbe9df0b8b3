"""The test of a GPU, on the CPU: what computes correctly passes, and each way to be wrong is named."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.launch.specs import run_spec
from zslurm.aegis import gpu_test
from zslurm.aegis.gpu_test import fault_of, try_gpu

CPU = torch.device("cpu")


def test_a_device_that_computes_correctly_passes() -> None:
    assert fault_of(CPU) is None


class Wrong:
    """A product of which one entry is changed, from the call `first` on."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, change: Any, first: int) -> None:
        self.calls, real = 0, torch.Tensor.__matmul__

        def product(left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
            out = real(left, right)
            if left.dtype == torch.float64:  # the reference
                return out
            self.calls += 1
            if self.calls >= first:
                out[3, 5] = change(out[3, 5])
            return out

        monkeypatch.setattr(torch.Tensor, "__matmul__", product)


@pytest.mark.parametrize(
    ("change", "first", "words"),
    [
        (lambda entry: entry + 1, 1, "1 of 16384 entries of an exact product in float32 are wrong"),
        (lambda entry: entry * 2 + 64, 2, "entries of an exact product in bfloat16 are wrong"),
        (lambda entry: entry * float("nan"), 4, "a product of finite bf16 matrices is not finite"),
        (lambda entry: entry + 1, 6, "the same product of bf16 matrices came out differently"),
        (lambda entry: entry + 9, 3, "a product of bf16 matrices is off by"),
    ],
    ids=["fp32", "bf16", "nan", "now and then", "far off"],
)
def test_one_wrong_entry_is_enough(monkeypatch: pytest.MonkeyPatch, change: Any, first: int, words: str) -> None:
    wrong = Wrong(monkeypatch, change, first)
    assert words in (fault_of(CPU) or "")
    assert wrong.calls >= first


def test_it_runs_as_a_program_and_answers(tmp_path: Path) -> None:
    tested = try_gpu("here", "0", None, run_spec(tmp_path), os.environ)
    assert (tested.ok, tested.reason) == (True, None)


def test_a_test_that_cannot_be_run_is_no_test_that_was_passed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    spec = run_spec(tmp_path, cluster={"launcher": "slurm"})
    tested = try_gpu("node3", "0", "12", spec, {"PATH": "/nonexistent"})
    assert tested.ok is None and "srun" in (tested.reason or "")
    monkeypatch.setattr(gpu_test, "__name__", "zslurm.aegis.no_such_module")
    assert try_gpu("here", "0", None, spec, os.environ).ok is None
