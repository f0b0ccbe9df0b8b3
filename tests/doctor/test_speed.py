"""The speed of GPUs: measured on the CPU here, compared as if they were a GPU's."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

from tests import forked
from tests.bench.synthetic import result
from tests.doctor.nodes import Node
from zslurm.bench.results.apply import settings_from
from zslurm.doctor.check import CheckOutcome, Status


def test_the_cpu_is_measured_without_a_threshold(node: Node) -> None:
    """By processes that have torch behind them and measure shortly."""
    forks = forked.environment(forked.server(torch=True), ["zslurm.bench.run.rank"])
    hidden = node.check("speed", environ=forks)
    assert hidden.status is Status.UNAVAILABLE and "torch sees none of the 8 GPUs" in hidden.reason
    outcome = node.check("speed", environ=forks, gpus_per_node=0, nics=(), rails_only=False)
    assert outcome.status is Status.PASS, outcome.reason
    assert outcome.reason.startswith("on the CPU, without a threshold: ")
    assert [len(outcome.data[name]) for name in ("product", "memory", "all_reduce")] == [2, 2, 2]


def outcome_of(
    node: Node, monkeypatch: pytest.MonkeyPatch, cores: int = 96, profile: dict[str, Any] | None = None,
    **changes: list[float],
) -> CheckOutcome:  # fmt: skip
    """The outcome of figures that a GPU node would have measured."""
    figures = {"product": [640.0] * 8, "memory": [4700.0] * 8, "all_reduce": [190.0] * 8} | changes
    rows = [
        {"what": what, "ranks_rate": rates, "least_rate": min(rates), "wrong": 0}
        for what, rates in figures.items()
    ]
    text = result("speed", rows).model_dump_json()
    node.program("speed", f"""for word; do last=$word; done; echo '{text}' > "$last" """)
    monkeypatch.setattr(sys, "executable", "speed")
    monkeypatch.setattr("os.sched_getaffinity", lambda pid: set(range(cores)))
    return node.check("speed", **(profile or {}))


def test_a_healthy_node_passes_the_thresholds(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    outcome = outcome_of(node, monkeypatch)
    assert (outcome.status, outcome.reason) == (
        Status.PASS, "640 TFLOPS, 4,700 GB/s of memory, 190 GB/s of all-reduce",
    )  # fmt: skip


def test_a_slow_gpu_is_named(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    outcome = outcome_of(node, monkeypatch, product=[640.0] * 5 + [310.0] + [640.0] * 2, all_reduce=[60.0] * 8)
    assert outcome.status is Status.FAIL
    assert outcome.reason == "GPU 5: 310 TFLOPS, under 600; 60 GB/s of all-reduce, under 100"
    assert outcome.remedy == "exclude the node; look at its clocks and power limits"


def test_a_node_is_compared_with_what_the_cluster_measured(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same figures pass the general limits, and fail those that `zslurm calibrate` found."""
    rows = [{"what": "memory", "ranks_rate": [4300.0] * 7 + [3200.0]}]
    stored = settings_from(result("speed", rows), Path("speed.json")).values["doctor.hbm_gb_s"]
    outcome = outcome_of(
        node, monkeypatch, profile={"doctor": {"hbm_gb_s": stored.value}}, memory=[4300.0] * 7 + [3200.0]
    )
    assert (outcome.status, outcome.reason) == (Status.FAIL, "GPU 7: 3200 GB/s of memory, under 3870")


def test_gpus_of_another_kind_than_the_profiles_have_no_threshold(
    node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    profile = {"gpu_type": "h100", "gpu_family": None}
    outcome = outcome_of(node, monkeypatch, profile=profile, product=[310.0] * 8)
    assert outcome.status is Status.WARN
    assert outcome.reason.startswith("AMD Instinct MI300X, not the profile's h100: no threshold; 310 TFLOPS")
    assert "a profile of their own" in outcome.remedy


def test_with_few_cores_a_low_figure_is_a_warning_with_the_reason(
    node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    outcome = outcome_of(node, monkeypatch, cores=8, product=[310.0] * 8)
    assert outcome.status is Status.WARN
    assert "only 8 cores here" in outcome.remedy


def test_ranks_that_fail_are_reported(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    node.program("speed", "echo 'zslurm: nothing was measured: rank 3 on node0 failed' >&2; exit 1")
    monkeypatch.setattr(sys, "executable", "speed")
    outcome = node.check("speed")
    assert (outcome.status, outcome.reason) == (
        Status.FAIL,
        "nothing could be measured: zslurm: nothing was measured: rank 3 on node0 failed",
    )


def test_torch_is_imported_on_request(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    outcome = node.check("torch-import", gpus_per_node=0, nics=(), rails_only=False)
    assert outcome.status is Status.PASS
    assert outcome.reason.startswith("torch ")
    node.program("python", """echo '["2.10.0", "the CPU", 0]'""")
    monkeypatch.setattr(sys, "executable", "python")
    missing = node.check("torch-import")
    assert (missing.status, "sees 0 of 8 GPUs" in missing.reason) == (Status.FAIL, True)
