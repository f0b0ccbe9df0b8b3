"""The test of a GPU, on the CPU: what computes correctly passes, and each way to be wrong is named."""

from __future__ import annotations

import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests import forked
from tests.submit.specs import run_spec
from zslurm.aegis.supervisor import gpu_test
from zslurm.aegis.supervisor.gpu_test import choose_device, fault_of, try_gpu, why_visible

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
    spec = run_spec(tmp_path, parallel={"device": "cpu"})
    tested = try_gpu("here", "0", None, spec, os.environ)
    assert tested == gpu_test.Tested(True, None, "CPU")


class Gpus:
    """In place of torch.cuda: the GPUs that a process sees."""

    def __init__(self, *properties: Any) -> None:
        self._properties = properties

    def is_available(self) -> bool:
        return bool(self._properties)

    def device_count(self) -> int:
        return len(self._properties)

    def get_device_properties(self, index: int) -> Any:
        return self._properties[index]


def mi300x(bus: int) -> SimpleNamespace:
    return SimpleNamespace(name="AMD Instinct MI300X", pci_domain_id=0, pci_bus_id=bus, pci_device_id=0, uuid="u")


OLDER = SimpleNamespace(name="MI300X", uuid="3fc1")
"""Of a torch that gives no PCI addresses."""


@pytest.mark.parametrize(
    ("gpu", "why", "seen", "chosen"),
    [
        ("1", "", [mi300x(0x05), mi300x(0xC1)], ("cuda:1", "GPU 1 (AMD Instinct MI300X, 0000:c1:00.0)")),
        ("0000:C1:00.0", "", [mi300x(5), mi300x(0xC1)], ("cuda:1", "GPU 1 (AMD Instinct MI300X, 0000:c1:00.0)")),
        ("0", "", [OLDER], ("cuda:0", "GPU 0 (MI300X, UUID 3fc1)")),
        ("0", "cpu", [mi300x(5)], ("cpu", "CPU")),
        ("0", "", [], ("cpu", "CPU")),
        (
            "0",
            "cluster.gpus_per_node: 8",
            [],
            "no GPU is visible, and the node should have one (cluster.gpus_per_node: 8)",
        ),
        ("2", "cluster.gpus_per_node: 8", [mi300x(5), mi300x(6)], "GPU 2 is not visible: there are 2"),
        ("2", "", [mi300x(5), mi300x(6)], ("cpu", "CPU")),
        ("0000:c1:00.0", "", [mi300x(5)], "GPU 0000:c1:00.0 is not visible: there are 1"),
        ("0000:c1:00.0", "", [OLDER], "GPU 0000:c1:00.0 is not visible: there are 1"),
    ],
)
def test_only_the_gpu_that_is_named_is_tested(gpu: str, why: str, seen: list[Any], chosen: Any) -> None:
    device = choose_device(gpu, why, "", Gpus(*seen))
    assert (device if isinstance(device, str) else (device.name, device.shown)) == chosen


@pytest.mark.parametrize(
    ("settings", "environ", "reason"),
    [
        ({"cluster": {"gpus_per_node": 8}}, {}, "(cluster.gpus_per_node: 8)"),
        ({}, {"ROCR_VISIBLE_DEVICES": "3"}, "(ROCR_VISIBLE_DEVICES=3)"),
    ],
)
@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU")
def test_a_gpu_that_is_not_there_fails_where_the_node_should_have_it(
    tmp_path: Path, settings: dict[str, Any], environ: dict[str, str], reason: str
) -> None:
    """It was called healthy: the CPU had been tested in its place."""
    forks = forked.environment(forked.server(torch=True), forked.BESIDE_RANKS, os.environ | environ)
    tested = try_gpu("here", "0", None, run_spec(tmp_path, **settings), forks)
    assert tested == gpu_test.Tested(False, f"no GPU is visible, and the node should have one {reason}", None)


def test_variables_that_give_no_gpu_expect_none() -> None:
    nothing = {"CUDA_VISIBLE_DEVICES": "", "ROCR_VISIBLE_DEVICES": "-1", "SLURM_GPUS_ON_NODE": "0"}
    nothing["HIP_VISIBLE_DEVICES"] = "(null)"
    assert why_visible(nothing) == ""
    assert why_visible({"SLURM_STEP_GPUS": "0,1"}) == "SLURM_STEP_GPUS=0,1"


def test_a_test_that_cannot_be_run_is_no_test_that_was_passed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    spec = run_spec(tmp_path, cluster={"launcher": "slurm"})
    tested = try_gpu("node3", "0", "12", spec, {"PATH": "/nonexistent"})
    assert tested.ok is None and "srun" in (tested.reason or "")
    monkeypatch.setattr(gpu_test, "__name__", "zslurm.aegis.no_such_module")
    assert try_gpu("here", "0", None, spec, os.environ).ok is None
