"""The benchmark: measured on the CPU here, compared as if they were a GPU's."""

from __future__ import annotations

import json
import sys

import pytest

from tests import forked
from tests.doctor.nodes import Node
from zslurm.doctor.check import CheckOutcome, Status

HEALTHY = {
    "device": "AMD Instinct MI300X",
    "gemm_tflops": [640.0] * 8,
    "memory_gb_s": [4700.0] * 8,
    "all_reduce_gb_s": 190.0,
}


def test_the_cpu_is_measured_without_a_threshold(node: Node) -> None:
    """By processes that have torch behind them and measure shortly."""
    forks = forked.environment(forked.server(torch=True), ["zslurm.doctor.speed"])
    outcome = node.check("benchmark", environ=forks)
    assert outcome.status is Status.PASS, outcome.reason
    assert outcome.reason.startswith("on the CPU, without a threshold: ")
    assert [len(outcome.data[name]) for name in ("gemm_tflops", "memory_gb_s")] == [2, 2]
    assert outcome.data["all_reduce_gb_s"] > 0


def outcome_of(node: Node, monkeypatch: pytest.MonkeyPatch, cores: int = 96, **changes: object) -> CheckOutcome:
    """The outcome of figures that a GPU node would have measured."""
    node.program("speed", f"echo '{json.dumps(HEALTHY | changes)}'")
    monkeypatch.setattr(sys, "executable", "speed")
    monkeypatch.setattr("os.sched_getaffinity", lambda pid: set(range(cores)))
    return node.check("benchmark")


def test_a_healthy_node_passes_the_thresholds(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    outcome = outcome_of(node, monkeypatch)
    assert (outcome.status, outcome.reason) == (
        Status.PASS, "640 TFLOPS, 4,700 GB/s of memory, 190 GB/s of all-reduce",
    )  # fmt: skip


def test_a_slow_gpu_is_named(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    outcome = outcome_of(node, monkeypatch, gemm_tflops=[640.0] * 5 + [310.0] + [640.0] * 2, all_reduce_gb_s=60.0)
    assert outcome.status is Status.FAIL
    assert outcome.reason == "GPU 5: 310 TFLOPS, under 600; 60 GB/s of all-reduce, under 100"
    assert outcome.remedy == "exclude the node; look at its clocks and power limits"


def test_with_few_cores_a_low_figure_is_a_warning_with_the_reason(
    node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    outcome = outcome_of(node, monkeypatch, cores=8, gemm_tflops=[310.0] * 8)
    assert outcome.status is Status.WARN
    assert "only 8 cores here" in outcome.remedy


def test_ranks_that_fail_are_reported(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    node.program("speed", "echo 'GPU 3: a matrix product of finite numbers is not finite' >&2; exit 1")
    monkeypatch.setattr(sys, "executable", "speed")
    outcome = node.check("benchmark")
    assert (outcome.status, outcome.reason) == (
        Status.FAIL,
        "the benchmark cannot run: GPU 3: a matrix product of finite numbers is not finite",
    )


def test_torch_is_imported_on_request(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    outcome = node.check("torch-import", gpus_per_node=0, nics=(), rails_only=False)
    assert outcome.status is Status.PASS
    assert outcome.reason.startswith("torch ")
    node.program("python", """echo '["2.10.0", "the CPU", 0]'""")
    monkeypatch.setattr(sys, "executable", "python")
    missing = node.check("torch-import")
    assert (missing.status, "sees 0 of 8 GPUs" in missing.reason) == (Status.FAIL, True)
