"""The products of a microbatch: together the FLOPs of `train/telemetry/flops.py`, and those of ZAYA1 by name."""

from __future__ import annotations

from typing import Any

import pytest

from zslurm.train.config import TrainConfig
from zslurm.train.plan.matmuls import Matmul, MicrobatchShape, matmuls
from zslurm.train.telemetry.flops import token_flops

PHASE = {"tokens": 10**9, "context": 4096, "global_batch": 4096, "micro_batch": 4, "lr": 1e-3}


def config(model: dict[str, Any] | None = None, **phase: Any) -> TrainConfig:
    return TrainConfig.model_validate(
        {"model": model or {}, "phases": [PHASE | phase], "parallel": {"dtype": "bf16"}}
    )


def of_a_microbatch(run: TrainConfig, recomputed: int = 0, *, on_cpu: bool = False) -> list[Matmul]:
    return matmuls(run, MicrobatchShape.of(run.phases[0]), recomputed, on_cpu=on_cpu)


MODELS: list[dict[str, Any]] = [
    {},
    {"router": "linear", "experts": 24, "experts_per_token": 3},
    {"vocab_size": 4099, "hidden_size": 130, "head_dim": 24, "rotary_share": 0.5, "layers": 3},
    {"conv_widths": [3, 4], "skip_expert": False, "expert_hidden_size": 1000, "router_hidden_size": 48},
]


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("context", [4096, 33])
@pytest.mark.parametrize("on_cpu", [False, True])
def test_the_sum_is_the_flops_of_the_tokens(model: dict[str, Any], context: int, on_cpu: bool) -> None:
    run = config(model, context=context)
    total = sum(product.total_flops for product in of_a_microbatch(run, on_cpu=on_cpu))
    assert total == pytest.approx(4 * context * token_flops(run.model, context, 0.0), rel=1e-9)


@pytest.mark.parametrize("ranks", [2, 8])
def test_ranks_that_share_sequences_have_equal_parts_of_the_flops(ranks: int) -> None:
    run = config(context=32768, micro_batch=1, context_parallel=ranks)
    total = sum(product.total_flops for product in of_a_microbatch(run))
    assert total * ranks == pytest.approx(32768 * token_flops(run.model, 32768, 0.0), rel=1e-9)


def test_backward_has_twice_the_flops_of_each_product() -> None:
    products = of_a_microbatch(config())
    for name in {product.name for product in products}:
        forward, *backward = (product for product in products if product.name == name)
        assert [product.pass_name for product in backward] == ["input gradient", "weight gradient"]
        assert sum(product.total_flops for product in backward) == 2 * forward.total_flops


def test_the_products_of_zaya1() -> None:
    """M, N, K and calls, worked out by hand from the published sizes, for 4 sequences of 4,096 tokens."""
    products = {(each.name, each.pass_name): each for each in of_a_microbatch(config())}

    def sizes(name: str, pass_name: str = "forward") -> tuple[int, ...]:
        each = products[name, pass_name]
        return each.m, each.n, each.k, each.batch, each.calls

    assert sizes("attention.projection") == (16384, 1536, 2048, 1, 40)
    assert sizes("attention.projection", "input gradient") == (16384, 2048, 1536, 1, 40)
    assert sizes("attention.projection", "weight gradient") == (1536, 2048, 16384, 1, 40)
    assert sizes("attention.scores") == (4096, 4096, 128, 32, 40)
    assert sizes("attention.output") == (16384, 2048, 1024, 1, 40)
    assert sizes("router.output") == (16384, 17, 256, 1, 40)
    assert sizes("experts.gate_up") == (1024, 4096, 2048, 16, 40)
    assert sizes("experts.down", "weight gradient") == (2048, 2048, 1024, 16, 40)
    assert sizes("head.logits") == (1024, 262272, 2048, 1, 16)
    assert "head.logits, last" not in {name for name, _ in products}
    assert products["experts.gate_up", "forward"].flops == 2 * 16384 * 4096 * 2048


def test_recomputed_layers_make_their_products_once_more() -> None:
    found = of_a_microbatch(config(), recomputed=10)
    again = [product for product in found if product.pass_name == "recompute"]
    forward = [product for product in found if product.pass_name == "forward" and "head" not in product.name]
    assert [product.name for product in again] == [product.name for product in forward]
    assert {product.calls for product in again} == {10}


def test_a_microbatch_has_no_more_sequences_than_the_rank() -> None:
    assert MicrobatchShape.of(config().phases[0], 3).tokens == 3 * 4096
    assert MicrobatchShape.of(config().phases[0], 9).tokens == 4 * 4096
