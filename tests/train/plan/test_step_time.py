"""Rates of products from a measured table, and the parts of a step's time."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.train.plan.test_matmuls import PHASE, config, of_a_microbatch
from zslurm.train.config import IntegrityConfig, OptimConfig, TrainConfig
from zslurm.train.errors import ConfigError
from zslurm.train.plan.communication import RankGroup, step_traffic
from zslurm.train.plan.matmuls import MicrobatchShape
from zslurm.train.plan.memory import plan_memory
from zslurm.train.plan.newton_schulz import matrix_batches
from zslurm.train.plan.parts import BOTH, FORWARD, PARTS
from zslurm.train.plan.rates import ASSUMED_TFLOPS, Rates, RateTable, load_rates
from zslurm.train.plan.step_time import StepTime, step_time

PROJECTION = {"m": 16384, "n": 1536, "k": 2048, "tflops": 400.0}
TINY = {"m": 8, "n": 8, "k": 8, "tflops": 100.0}


def table(*rows: dict[str, Any], **others: Any) -> RateTable:
    return RateTable.model_validate({"gemm": rows, **others})


def test_a_product_has_its_own_rate_that_of_a_near_one_or_the_median() -> None:
    rates = Rates(table(PROJECTION, TINY, TINY | {"m": 9, "tflops": 10.0}), on_cpu=False)
    found = {(each.name, each.pass_name): rates.of(each) for each in of_a_microbatch(config())}
    assert found["attention.projection", "forward"] == (400.0, "measured")
    assert found["attention.output", "forward"] == (400.0, "near")  # K is half
    assert found["head.logits", "forward"] == (100.0, "median")
    assert found["experts.gate_up", "forward"] == (100.0, "median")  # 16 products in a call
    assert found["attention.scores", "forward"] == (100.0, "median")


def test_attention_has_a_rate_apart() -> None:
    rates = Rates(table(PROJECTION, attention_tflops=222.0), on_cpu=True)
    scores = next(each for each in of_a_microbatch(config()) if each.name == "attention.scores")
    assert rates.of(scores) == (222.0, "measured")


def test_without_a_table_a_gpu_has_the_assumed_rate_and_a_cpu_none() -> None:
    product = of_a_microbatch(config())[0]
    assert Rates(None, on_cpu=False).of(product) == (ASSUMED_TFLOPS, "assumed")
    assert Rates(None, on_cpu=True).of(product) is None


def times(rates: Rates, ranks: int = 1, sequences: int = 8, checked_every: int = 0) -> StepTime | None:
    run = config().model_copy(update={"integrity": IntegrityConfig(every_steps=checked_every)})
    memory = plan_memory(run, ranks, on_cpu=False)
    traffic = step_traffic(run, RankGroup.of(ranks, 8, "flat"))
    kept = memory.microbatches[0].layers
    return step_time(run, run.phases[0], sequences, of_a_microbatch(run), memory, traffic, rates, kept)


def test_products_and_attention_take_their_flops_over_their_rates() -> None:
    time = times(Rates(table(TINY, attention_tflops=50.0), on_cpu=False))
    assert time is not None
    products = of_a_microbatch(config())
    attention = sum(each.total_flops for each in products if each.kind == "attention")
    others = sum(each.total_flops for each in products if each.kind != "attention")
    assert time.attention == pytest.approx(2 * attention / 50e12)  # of two microbatches
    assert time.products == pytest.approx(2 * others / 100e12)
    assert time.communication == pytest.approx(0, abs=1e-12)  # of a single rank
    assert time.seconds == time.products + time.attention + time.operations + time.optimizer


def test_checks_take_a_microbatch_in_every_kth_step_and_read_the_state_in_each() -> None:
    rates = Rates(table(TINY, attention_tflops=50.0), on_cpu=False)
    plain, often, rarely = (times(rates, checked_every=every) for every in (0, 10, 1000))
    assert plain is not None
    assert often is not None
    assert rarely is not None
    assert plain.checks == 0
    microbatch = (plain.products + plain.attention + plain.operations) / 2
    assert often.checks - rarely.checks > (1 / 10 - 1 / 1000) * microbatch
    assert 0 < rarely.checks < often.checks
    assert often.seconds == pytest.approx(plain.seconds + often.checks)


def test_a_checked_step_of_several_ranks_reduces_its_gradients_once_more() -> None:
    def in_a_checked_step(ranks: int) -> float:
        often, rarely = (times(Rates(None, on_cpu=False), ranks, checked_every=every) for every in (1, 1000))
        assert often is not None
        assert rarely is not None
        return (often.checks - rarely.checks) / (1 - 1 / 1000)

    traffic = step_traffic(config(), RankGroup.of(64, 8, "flat"))
    reduction = traffic.reduce_scatter.seconds + traffic.to_owners.seconds
    assert reduction > 0
    assert in_a_checked_step(64) - in_a_checked_step(1) == pytest.approx(reduction)


def test_several_ranks_wait_for_communication_and_update_less() -> None:
    alone, many = times(Rates(None, on_cpu=False)), times(Rates(None, on_cpu=False), ranks=64)
    assert alone is not None
    assert many is not None
    assert many.products == alone.products
    assert many.communication > 0
    assert many.operations == alone.operations
    assert many.optimizer < alone.optimizer


def part(name: str, pass_name: str, seconds: float, tokens: int) -> dict[str, Any]:
    sizes = {"tokens": tokens, "length": PHASE["context"], "width": config().model.hidden_size}
    return {"part": name, "pass_name": pass_name, "seconds": seconds, **sizes}


def test_measured_parts_give_the_time_of_a_microbatch() -> None:
    run = config()
    tokens = MicrobatchShape.of(run.phases[0], 8).tokens
    # Measured with half of the tokens: the times are in proportion to them.
    measured = [part(name, *each, tokens // 2) for name in PARTS for each in ((FORWARD, 1.0), (BOTH, 3.0))]
    time = times(Rates(table(TINY, attention_tflops=50.0, parts=measured), on_cpu=False))
    unmeasured = times(Rates(table(TINY, attention_tflops=50.0, parts=measured[1:]), on_cpu=False))
    assert time is not None
    assert unmeasured is not None
    runs = 2 + 3 * run.model.layers + 2 * run.model.layers + 1
    of_parts = time.products + time.attention + time.operations
    assert of_parts == pytest.approx(2 * 2 * 3.0 * runs)  # two microbatches of twice the tokens
    convolutions = sum(each.total_flops for each in of_a_microbatch(run) if each.kind == "convolution")
    assert unmeasured.products - time.products == pytest.approx(2 * convolutions / 100e12)
    assert unmeasured.operations < time.operations


def test_a_cpu_without_a_table_has_no_time() -> None:
    assert times(Rates(None, on_cpu=True)) is None


@pytest.mark.parametrize("split", [False, True])
def test_newton_schulz_of_a_small_model_by_hand(split: bool) -> None:
    model = {"layers": 1, "hidden_size": 64, "experts": 2, "expert_hidden_size": 32, "router": "linear"}
    sizes = {"query_heads": 2, "kv_heads": 1, "head_dim": 16, "vocab_size": 128}
    run = TrainConfig.model_validate(
        {"model": model | sizes, "phases": [PHASE], "optim": {"muon": {"split_gate_up": split}}}
    )
    attention = [(32, 64), (16, 64), (8, 64), (8, 64), (32, 64)]
    gate_up = 4 * [(32, 64)] if split else 2 * [(64, 64)]
    sides = [*attention, (3, 64), *gate_up, *2 * [(32, 64)]]
    expected = sum(5 * (4 * short**2 * long + 2 * short**3) for short, long in sides)
    batches = matrix_batches(run)
    assert sum(each.count * each.flops for each in batches) == expected
    assert sum(each.count for each in batches) == len(sides)
    assert len({(each.rows, each.columns) for each in batches}) == len(batches)


def test_newton_schulz_steps_take_the_time_measured_in_their_own_format() -> None:
    batches = matrix_batches(config())
    assert {each.dtype for each in batches} == {"bf16"}  # whatever the run's is
    sizes = [{"rows": each.rows, "columns": each.columns, "steps": each.steps} for each in batches]
    measured = [each | {"matrices": 4, "dtype": "bf16", "seconds": 2.0} for each in sizes]
    in_fp32 = [each | {"dtype": "fp32"} for each in measured]
    time, other, unmeasured = (
        times(Rates(table(TINY, newton_schulz=rows), on_cpu=False)) for rows in (measured, in_fp32, ())
    )
    assert time is not None
    assert other is not None
    assert unmeasured is not None
    count = sum(each.count for each in batches)
    assert other.optimizer == unmeasured.optimizer  # of the same matrices in another format
    flops = sum(each.count * each.flops for each in batches)
    assert time.optimizer - unmeasured.optimizer == pytest.approx(count * 0.5 - flops / 100e12)
    assert time.products == unmeasured.products


def test_adamw_alone_has_no_newton_schulz_steps() -> None:
    adamw = config().model_copy(update={"optim": OptimConfig(matrices="adamw")})
    assert matrix_batches(adamw) == []


def result(*rows: dict[str, Any], benchmark: str = "gemm", gpu: str = "AMD Instinct MI300X") -> dict[str, Any]:
    return {"benchmark": benchmark, "machine": {"gpu": gpu, "cpu": "a CPU"}, "rows": list(rows)}


def row(sizes: dict[str, Any], **others: Any) -> dict[str, Any]:
    named = {"product": "", "pass": "forward", "kind": "dense", "batch": 1, "flops": 1e12, "dtype": "bf16"}
    return named | sizes | others


def test_results_of_gemm_and_hbm_are_one_table(tmp_path: Path) -> None:
    attention = {"m": 9, "n": 9, "k": 9, "kind": "attention", "product": "attention"}
    rows = [
        row(PROJECTION, product="attention.projection"),
        row(attention, flops=1e12, tflops=100.0),
        row(attention, flops=2e12, tflops=400.0) | {"pass": "backward"},
        row({"m": 64, "n": 16, "k": 8}, kind="part", product="router", tflops=0.0, seconds=0.5),
        row({"m": 48, "n": 16, "k": 5}, kind="newton_schulz", dtype="fp32", batch=3, tflops=1.0, seconds=0.25),
    ]
    triads = [{"pattern": "triad", "bytes": size, "gb_s": size / 2} for size in (8000, 8)]
    paths = [tmp_path / "gemm.json", tmp_path / "hbm.json"]
    paths[0].write_text(json.dumps(result(*rows)))
    paths[1].write_text(json.dumps(result(*triads, {"pattern": "dot", "bytes": 10**9}, benchmark="hbm")))
    found = load_rates(paths, "bf16")
    assert [(each.m, each.tflops, each.product) for each in found.gemm] == [(16384, 400.0, "attention.projection")]
    assert [(each.part, each.tokens, each.seconds) for each in found.parts] == [("router", 64, 0.5)]
    (steps,) = found.newton_schulz  # in another format than the run's
    assert (steps.rows, steps.columns, steps.steps, steps.matrices, steps.dtype) == (48, 16, 5, 3, "fp32")
    assert found.attention_tflops == pytest.approx(3 / (1 / 100 + 2 / 400))
    assert (found.memory_gb_s, found.device) == (4000.0, "AMD Instinct MI300X")


def test_a_product_has_the_rate_of_its_pass() -> None:
    square = {"m": 16384, "n": 256, "k": 256, "product": "router.first"}
    rates = Rates(
        table(
            square | {"pass_name": "forward", "tflops": 7.0},
            square | {"pass_name": "input gradient", "tflops": 5.0},
        ),
        on_cpu=False,
    )
    products = [each for each in of_a_microbatch(config(), recomputed=1) if each.name == "router.first"]
    assert [(each.pass_name, rates.of(each)) for each in products if each.pass_name != "weight gradient"] == [
        ("forward", (7.0, "measured")),
        ("input gradient", (5.0, "measured")),
        ("recompute", (7.0, "measured")),
    ]


NO_RESULT = "not a result of `zslurm bench gemm` or `zslurm bench hbm`"


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("{", "rates.json: "),
        ("[]", NO_RESULT),
        ("{}", "not a whole result of `zslurm bench`: 'benchmark'"),
        (json.dumps(result(benchmark="collectives")), NO_RESULT),
        (json.dumps(result()), "no table of rates: gemm: "),
        (json.dumps(result(TINY)), "not a whole result of `zslurm bench`: 'kind'"),
        (json.dumps(result(row(TINY, k=0))), "gemm.0.k: "),
        (json.dumps(result(row(TINY, tflops="fast"))), "gemm.0.tflops: "),
        (
            json.dumps(result(row(TINY, dtype="fp32"))),
            "in fp32, and the run's parallel.dtype is bf16; measure with",
        ),
    ],
)
def test_a_result_that_is_none_is_refused_in_one_line(tmp_path: Path, text: str, why: str) -> None:
    path = tmp_path / "rates.json"
    path.write_text(text)
    with pytest.raises(ConfigError) as refused:
        load_rates([path], "bf16")
    assert why in str(refused.value)
    assert "\n" not in str(refused.value)


def test_results_of_two_devices_are_refused(tmp_path: Path) -> None:
    paths = [tmp_path / "first.json", tmp_path / "second.json"]
    for path, gpu in zip(paths, ("AMD Instinct MI300X", "AMD Instinct MI325X"), strict=True):
        path.write_text(json.dumps(result(row(TINY), gpu=gpu)))
    with pytest.raises(ConfigError, match=r"second\.json: was measured on AMD Instinct MI325X, and .*MI300X"):
        load_rates(paths, "bf16")


def test_a_result_that_is_not_there_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"rates\.json: cannot be read: No such file"):
        load_rates([tmp_path / "rates.json"], "bf16")
