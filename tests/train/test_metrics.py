"""What metrics.jsonl says of a step, against direct computation."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch

from train.jsonl import read_jsonl
from train.metrics import MetricsWriter, last_attempt, routing_metrics


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


def test_a_single_expert_is_always_evenly_used() -> None:
    assert routing_metrics(torch.tensor([[9, 1]]), skip_expert=True)["load_entropy"] == 1.0


def test_counts_beyond_what_fp32_can_hold_are_exact() -> None:
    metrics = routing_metrics(torch.tensor([[2**24, 2**24 + 1, 0]]), skip_expert=True)
    assert metrics["load_entropy"] < 1.0


def test_lines_carry_their_attempt_and_the_last_one_is_found(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    assert last_attempt(path) == 0
    for attempt in (1, 2):
        writer = MetricsWriter(path, attempt)
        writer.write("step", step=attempt, loss=4.0)
        writer.close()
    rows = list(read_jsonl(path))
    assert [(row["kind"], row["attempt"], row["step"]) for row in rows] == [("step", 1, 1), ("step", 2, 2)]
    assert rows[0]["time"] <= rows[1]["time"]
    assert last_attempt(path) == 2
