"""Matrix products: those of a run by name, made as the trainer makes them, with right results."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.bench.alone import MACHINE, alone
from zslurm.bench import gemm
from zslurm.bench.measurement import Point
from zslurm.bench.parts import BuiltPart
from zslurm.cli.bench.measurements import run_named
from zslurm.cli.bench.run import Measure
from zslurm.config.layers import Override
from zslurm.core.errors import NotFound
from zslurm.submit.run_products import run_newton_schulz, run_parts, run_products
from zslurm.submit.size import Card, run_size
from zslurm.train.plan.parts import PARTS, calls
from zslurm.train.plan.rates import Rates

ON_CPU = Override.of("parallel.device", "cpu")

DENSE = {"product": "", "pass": "forward", "kind": "dense", "m": 96, "n": 40, "k": 64, "batch": 1, "group": 1}
CPU = torch.device("cpu")


def values(**others: Any) -> dict[str, Any]:
    found = {**DENSE, "dtype": "fp32", **others}
    return {**found, "flops": 2.0 * found["m"] * found["n"] * found["k"] * found["batch"]}


@pytest.mark.parametrize("dtype", ["fp32", "bf16", "fp64"])
@pytest.mark.parametrize("pass_name", ["forward", "input gradient", "weight gradient"])
@pytest.mark.parametrize("kind", ["dense", "grouped", "batch"])
def test_every_layout_gives_the_product_of_its_operands(dtype: str, pass_name: str, kind: str) -> None:
    batch = 1 if kind == "dense" else 3
    made = gemm.Product(
        values(**{"pass": pass_name}, kind=kind.replace("batch", "dense"), batch=batch, dtype=dtype), CPU
    )
    made.call()
    expected = made.left.double() @ made.right.double()
    tolerance = 0.2 if dtype == "bf16" else 1e-4
    assert torch.allclose(made.out.reshape(expected.shape).double(), expected, atol=tolerance, rtol=tolerance)
    assert (made.left.shape, made.right.shape) == ((batch, 96, 64), (batch, 64, 40))
    assert made.wrong() == 0


def test_the_head_multiplies_narrow_operands_with_a_wide_result() -> None:
    made = gemm.Product(values(product="head.logits", dtype="bf16"), CPU)
    made.call()
    assert made.out.dtype == torch.float32
    assert made.wrong() == 0


def test_wrong_rows_are_counted() -> None:
    made = gemm.Product(values(), CPU)
    made.call()
    made.out[5] += 100.0
    made.out[7, 3] = float("nan")
    assert made.wrong() == 2


def test_attention_forward_and_backward_have_rates() -> None:
    for pass_name in ("forward", "backward"):
        about = {"product": "attention", "kind": "attention", "pass": pass_name, "n": 96, "k": 8, "batch": 4}
        row = gemm.run(Point(values(**about, group=2), 0.1), alone())
        assert row is not None
        assert row["tflops"] > 0
        assert row["wrong"] == 0


@pytest.fixture
def products() -> list[dict[str, Any]]:
    spec = run_named("zaya1-tiny", Measure(), [ON_CPU])
    return run_products(spec, on_cpu=True)


def test_the_products_of_a_recipe_have_its_names_and_sizes(products: list[dict[str, Any]]) -> None:
    found = {(row["product"], row["pass"]): row for row in products}
    assert len(found) == len(products)
    gate_up = found["experts.gate_up", "forward"]
    assert [gate_up[name] for name in ("kind", "m", "n", "k", "batch")] == ["grouped", 256, 512, 128, 4]
    assert gate_up["flops"] == 2 * 4 * 256 * 512 * 128
    attention = found["attention", "backward"]
    assert [attention[name] for name in ("m", "n", "k", "batch", "group")] == [256, 256, 32, 16, 2]
    assert attention["flops"] == 2 * found["attention", "forward"]["flops"]
    assert not [row for row in products if row["kind"] == "convolution"]


def test_a_point_for_each_product_and_none_that_does_not_fit(products: list[dict[str, Any]]) -> None:
    options = {"products": products, "dtype": "fp32", "m": None, "n": None, "k": None}
    assert len(gemm.points(options, MACHINE).points) == len(products)
    small = MACHINE.model_copy(update={"gpu_memory": 4 << 20})
    plan = gemm.points(options, small)
    assert len(plan.points) + len(plan.skipped) == len(products)
    assert any(skipped.point["product"] == "head.logits" for skipped in plan.skipped)
    assert "for each rank, of 4.00 MiB that are free" in plan.skipped[0].reason


def test_a_sweep_has_every_combination() -> None:
    options = {"products": None, "dtype": "fp32", "m": [8, 16], "n": [8], "k": None}
    assert len(gemm.points(options, MACHINE).points) == 2 * len(gemm.SWEEP["cpu"]["k"])


def test_a_recipe_that_does_not_exist_is_refused_with_the_nearest_name(tmp_path: Path) -> None:
    with pytest.raises(NotFound, match=r"no file and no recipe has this name; did you mean zaya1-8b\?"):
        run_named("zaya-8b", Measure(), [])


@pytest.mark.parametrize("part", PARTS)
def test_the_parts_of_a_microbatch_run_with_right_numbers(part: str) -> None:
    spec = run_named("zaya1-tiny", Measure(), [ON_CPU])
    rows = [row for row in run_parts(spec, on_cpu=True) if row["product"] == part]
    assert [row["pass"] for row in rows] == ["forward", "forward and backward"]
    for row in rows:
        # A sequence of 16 tokens, not 256: what is computed is the same.
        made = BuiltPart({**row, "m": 32, "n": 16, "dtype": "bf16"}, CPU)
        made.call()
        assert made.wrong() == 0
        assert len(made.out[0].shape) == 0 or made.out[0].numel() % 32 == 0


def test_parts_have_all_products_of_a_microbatch() -> None:
    spec = run_named("zaya1-tiny", Measure(), [ON_CPU])
    (size,) = run_size(spec, Card(None, None), Rates(None, on_cpu=True), on_cpu=True).phases
    both = [row for row in run_parts(spec, on_cpu=True) if row["pass"] == "forward and backward"]
    assert sum(row["flops"] * calls(spec.model, row["product"]) for row in both) == pytest.approx(size.flops)


def test_muons_steps_are_measured_in_the_format_that_muon_multiplies_in() -> None:
    spec = run_named("zaya1-tiny", Measure(), [ON_CPU, Override.parse("parallel.dtype=fp32")])
    found = run_newton_schulz(spec, on_cpu=True)
    assert {(row["dtype"], row["k"], row["kind"]) for row in found} == {("bf16", 5, "newton_schulz")}
    options = {"products": found, "dtype": "fp32", "m": None, "n": None, "k": None}
    smallest = min(gemm.points(options, MACHINE).points, key=lambda point: point.values["flops"])
    row = gemm.run(smallest, alone())
    assert row is not None
    assert (row["dtype"], row["wrong"]) == ("bf16", 0)
    assert row["tflops"] == pytest.approx(smallest.values["flops"] / row["seconds"] / 1e12)
    assert "coefficients" not in row


def test_matrices_that_are_no_longer_orthogonal_are_counted() -> None:
    about = {"product": "muon.newton_schulz", "kind": "newton_schulz", "m": 24, "n": 16, "k": 5, "batch": 3}
    made = gemm.NewtonSchulz({**values(**about), "coefficients": "keller"}, CPU)
    made.call()
    assert made.wrong() == 0
    made.x_KMN[1, 3] = float("nan")
    made.x_KMN[2, 5] = 2.0
    assert made.wrong() == 2
