"""What metrics.jsonl holds of a step, against direct computation."""

from __future__ import annotations

import math
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest
import torch

from zslurm.train.jsonl import read_jsonl
from zslurm.train.telemetry.metrics_file import MetricsFile, last_attempt
from zslurm.train.telemetry.step_metrics import (
    MemoryCheck,
    describe_step,
    load_by_layer,
    memory_metrics,
    routing_metrics,
)


def test_skip_share_and_load_entropy_are_what_they_say() -> None:
    counts = torch.tensor([[30, 10, 20, 40], [5, 5, 50, 40]])
    metrics = routing_metrics(counts, skip_expert=True)
    assert metrics["skip_share"] == pytest.approx((40 + 40) / 200)

    def entropy(*shares: float) -> float:
        return -sum(p * math.log(p) for p in shares) / math.log(3)

    uneven = entropy(5 / 60, 5 / 60, 50 / 60)
    assert uneven < entropy(30 / 60, 10 / 60, 20 / 60)
    assert metrics["load_entropy"] == pytest.approx(uneven), "the least even layer counts"


def test_without_a_skip_class_every_class_is_an_expert() -> None:
    metrics = routing_metrics(torch.tensor([[10, 10, 10, 10]]), skip_expert=False)
    assert metrics == {"skip_share": pytest.approx(0), "load_entropy": pytest.approx(1)}


@pytest.mark.parametrize(
    ("counts", "entropy", "skipped"),
    [
        ([[7, 7, 0]], 1.0, 0.0),  # even
        ([[14, 0, 0]], 0.0, 0.0),  # one expert does everything
        ([[0, 0, 14]], 0.0, 1.0),  # everything skips: no expert is used
    ],
)
def test_the_ends_of_the_scale(counts: list[list[int]], entropy: float, skipped: float) -> None:
    metrics = routing_metrics(torch.tensor(counts), skip_expert=True)
    assert metrics == {"skip_share": pytest.approx(skipped), "load_entropy": pytest.approx(entropy)}


def test_every_layer_is_reported_by_itself() -> None:
    counts = torch.tensor([[30, 30, 40], [100, 0, 0]])
    assert load_by_layer(counts, skip_expert=True) == {
        "load_entropy_by_layer": [1.0, 0.0],
        "load_shares": [[0.3, 0.3, 0.4], [1.0, 0.0, 0.0]],
    }
    evenness = load_by_layer(counts, skip_expert=False)["load_entropy_by_layer"]
    assert evenness == pytest.approx(
        [routing_metrics(counts[:1], skip_expert=False)["load_entropy"], 0.0], abs=1e-5
    )


def test_memory_of_a_cpu_rank_is_that_of_its_process() -> None:
    metrics = memory_metrics(torch.device("cpu"))
    assert set(metrics) == {"memory_rss_bytes"}
    # Not equal to a byte: the kernel may take pages back at any time.
    assert metrics["memory_rss_bytes"] == pytest.approx(psutil.Process().memory_info().rss, rel=0.2)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_memory_of_a_gpu_rank_is_the_peak_since_the_last_look() -> None:
    device = torch.device("cuda")
    memory_metrics(device)
    torch.ones(100_000_000, device=device)
    found = memory_metrics(device)
    assert found["memory_allocated_bytes"] >= 400_000_000
    assert found["memory_reserved_bytes"] >= found["memory_allocated_bytes"]
    assert memory_metrics(device)["memory_allocated_bytes"] < 400_000_000


def memory_check(monkeypatch: pytest.MonkeyPatch, total: int) -> MemoryCheck:
    """The check of a GPU with so much memory; nothing runs there."""
    properties = SimpleNamespace(total_memory=total)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
    return MemoryCheck(torch.device("cuda", 0))


def memory_of(reserved: int) -> dict[str, int]:
    return {"memory_reserved_bytes": reserved, "memory_allocated_bytes": reserved // 2}


def test_little_memory_left_after_the_first_steps_is_one_warning(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    check = memory_check(monkeypatch, 192 << 30)
    check.look(1, memory_of(153 << 30))  # 79.7 %
    assert not caplog.messages
    check.look(2, memory_of(160 << 30))
    check.look(3, memory_of(170 << 30))
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert caplog.messages[0].startswith("memory: step 2 took 83 % of this GPU's 192.0 GiB (80.0 GiB in tensors")
    assert "parallel.recompute" in caplog.messages[0]


def test_later_steps_and_cpus_are_not_warned_about(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    check = memory_check(monkeypatch, 100)
    for step in range(1, 4):
        check.look(step, memory_of(80))
    check.look(4, memory_of(99))
    MemoryCheck(torch.device("cpu")).look(1, memory_metrics(torch.device("cpu")))
    assert not caplog.messages


def test_a_steps_line_shows_mfu_where_it_is_known() -> None:
    row = {"step": 5, "loss": 3.25, "lr": 1e-3, "grad_norm": 0.5, "tokens_per_s": 12345.6, "mfu": 0.4123}
    assert describe_step(row, 100) == "step 5/100 loss 3.2500 lr 0.001 grad norm 0.5 12,346 tokens/s mfu 41.2 %"
    assert describe_step(row | {"mfu": None}, 100).endswith("12,346 tokens/s")


def test_a_single_expert_is_always_evenly_used() -> None:
    assert routing_metrics(torch.tensor([[9, 1]]), skip_expert=True)["load_entropy"] == 1.0


def test_counts_beyond_what_fp32_can_hold_are_exact() -> None:
    metrics = routing_metrics(torch.tensor([[2**24, 2**24 + 1, 0]]), skip_expert=True)
    assert metrics["load_entropy"] < 1.0


def test_lines_carry_their_attempt_and_the_last_one_is_found(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    assert last_attempt(tmp_path) == 0
    for attempt in (1, 2):
        writer = MetricsFile(path, attempt)
        writer.recorded("step", {"step": attempt, "loss": 4.0})
        writer.finish(lambda: False)
    rows = list(read_jsonl(path))
    assert [(row["kind"], row["attempt"], row["step"]) for row in rows] == [("step", 1, 1), ("step", 2, 2)]
    assert rows[0]["time"] <= rows[1]["time"]
    assert last_attempt(tmp_path) == 2
