"""Parts of a microbatch on gfx942, next to an independent estimate of each."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.config.run_files import resolve_text
from zslurm.train.config import TrainConfig
from zslurm.train.plan.gpu_parts import NOW, REFERENCE, largest_gains, parts_of_microbatch
from zslurm.train.plan.matmuls import Matmul, MicrobatchShape, matmuls
from zslurm.train.plan.rates import GemmRate, Rates, RateTable

ESTIMATED_MS = {  # of a kernel engineer, from the code objects and bandwidths, for 16,384 tokens: within a quarter
    "projections": 49, "convolutions": 14, "attention": 85, "router": 22, "experts: products": 160,
    "element by element": 38, "head: products": 111, "head: losses and gradient of logits": 41,
    "head: sums of its chunks": 32, "sums of gradients": 12, "optimizer and norm, of 1,024 ranks": 5,
    "gaps between kernels": 10,
}  # fmt: skip


@pytest.fixture
def planned(tmp_path: Path) -> tuple[TrainConfig, MicrobatchShape, list[Matmul]]:
    config = resolve_text(tmp_path, "extends: zaya1-8b\n").spec
    microbatch = MicrobatchShape.of(config.phases[0])
    return config, microbatch, matmuls(config, microbatch, 0, on_cpu=False)


ASSUMED = Rates(None, on_cpu=False)


def test_every_part_is_that_of_the_reference_within_its_error(
    planned: tuple[TrainConfig, MicrobatchShape, list[Matmul]],
) -> None:
    parts = parts_of_microbatch(*planned, ASSUMED, stated=REFERENCE)
    found = {part.name: 1e3 * part.seconds for part in parts}
    assert found.keys() == ESTIMATED_MS.keys()
    for name, milliseconds in ESTIMATED_MS.items():
        assert found[name] == pytest.approx(milliseconds, rel=0.25), name
    assert sum(found.values()) == pytest.approx(584, rel=0.1)
    assert all(not part.measured for part in parts)


def test_the_kernels_as_they_are_save_what_was_expected_of_them(
    planned: tuple[TrainConfig, MicrobatchShape, list[Matmul]],
) -> None:
    before = sum(part.seconds for part in parts_of_microbatch(*planned, ASSUMED, stated=REFERENCE))
    now = sum(part.seconds for part in parts_of_microbatch(*planned, ASSUMED, stated=NOW, chunk=4096))
    assert 0.110 < before - now < 0.180, "head 55 to 65 ms, tiles 50 to 65, sums 8 to 10"


def test_a_measured_product_has_its_rate(planned: tuple[TrainConfig, MicrobatchShape, list[Matmul]]) -> None:
    head = next(product for product in planned[2] if product.name == "head.logits")
    row = GemmRate(product=head.name, pass_name="", m=head.m, n=head.n, k=head.k, batch=1, tflops=237.5)
    rates = Rates(RateTable(gemm=(row,)), on_cpu=False)
    (part,) = (p for p in parts_of_microbatch(*planned, rates) if p.name == "head: products")
    stated = next(p for p in parts_of_microbatch(*planned, ASSUMED) if p.name == "head: products")
    assert part.measured
    assert part.seconds > 1.3 * stated.seconds


def test_the_largest_gains_come_first(planned: tuple[TrainConfig, MicrobatchShape, list[Matmul]]) -> None:
    gains = largest_gains(*planned, ASSUMED, 4096)
    assert len(gains) >= 3
    assert [gain.seconds for gain in gains] == sorted((gain.seconds for gain in gains), reverse=True)
    attention = next(gain for gain in gains if "AITER" in gain.what)
    assert 0.030 <= attention.seconds <= 0.045
