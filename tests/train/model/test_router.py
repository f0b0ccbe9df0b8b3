"""The router: what the bias does and does not, depth averaging, probabilities."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from tests.train.models import random_like, scrambled, tiny_config
from zslurm.train.model.router import Router, Routing
from zslurm.train.model.zaya import build

BIAS = torch.zeros(4)


def router_of(layer: int, dtype: torch.dtype = torch.float64, **changes: int) -> Router:
    router: Router = scrambled(tiny_config(**changes), dtype).layers[layer].router
    return router


def inputs(dtype: torch.dtype = torch.float64) -> Tensor:
    return random_like(torch.empty(40, 12), "router").to(dtype)


def test_bias_moves_the_choice_and_not_the_weight() -> None:
    router = router_of(0)
    free: Routing = router(inputs(), None, BIAS)
    forced: Routing = router(inputs(), None, torch.tensor([0.0, 0.0, 5.0, 0.0]))
    assert len(free.classes_TK.unique()) > 1
    assert (forced.classes_TK == 2).all()
    same = free.classes_TK == 2
    assert same.any() and not same.all()
    assert torch.equal(forced.weights_TK[same], free.weights_TK[same])
    assert (forced.weights_TK[~same] < free.weights_TK[~same]).all()
    assert torch.equal(forced.state_TR, free.state_TR)


def test_a_bias_of_all_classes_changes_nothing() -> None:
    router = router_of(0)
    shifted = router(inputs(), None, BIAS + 0.5)
    assert torch.equal(shifted.classes_TK, router(inputs(), None, BIAS).classes_TK)


def test_weights_are_probabilities_over_all_classes() -> None:
    everything = router_of(0, experts_per_token=4)(inputs(), None, BIAS)
    torch.testing.assert_close(everything.weights_TK.sum(dim=-1), torch.ones(40, dtype=torch.float64))
    assert (everything.weights_TK.diff(dim=-1) <= 0).all(), "most preferred first"
    some = router_of(0, experts_per_token=2)(inputs(), None, BIAS)
    torch.testing.assert_close(some.weights_TK, everything.weights_TK[:, :2])


def test_state_is_averaged_over_depth_before_the_norm() -> None:
    router = router_of(1)
    previous = random_like(torch.empty(40, 6), "previous")
    state = router(inputs(), previous, BIAS).state_TR
    torch.testing.assert_close(state, router.down(inputs()) + router.previous_scale * previous)


def test_choice_depends_on_the_previous_layers_state() -> None:
    router = router_of(1)
    previous = random_like(torch.empty(40, 6), "previous")
    with_it = router(inputs(), 5 * previous, BIAS).classes_TK
    assert (with_it != router(inputs(), 0 * previous, BIAS).classes_TK).any()


def test_first_router_has_no_scale_for_a_state_before_it() -> None:
    assert not hasattr(router_of(0), "previous_scale")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_softmax_is_fp32_whatever_the_parameters(dtype: torch.dtype) -> None:
    routing = router_of(0, dtype, experts_per_token=4)(inputs(dtype), None, BIAS)
    assert routing.weights_TK.dtype == torch.float32
    assert (routing.weights_TK.sum(dim=-1) - 1).abs().max() < 1e-6
    assert routing.state_TR.dtype == dtype


@pytest.mark.parametrize(("hidden_size", "width"), [(128, 32), (512, 64), (1024, 256)])
def test_tokens_differ_in_their_first_choice_as_much_at_any_width(hidden_size: int, width: int) -> None:
    """A router that starts flat sends all tokens to one expert, whichever the balancing bias prefers."""
    config = tiny_config(hidden_size=hidden_size, router_hidden_size=width, experts=16, layers=1)
    router: Router = build(config, 0, dtype=torch.float32).layers[0].router
    x_TD = random_like(torch.empty(2000, hidden_size), "normed").float()
    bias_C = torch.zeros(17)
    routing: Routing = router(x_TD, None, bias_C)
    assert len(routing.classes_TK.unique()) >= 12
    nudged = router(x_TD, None, bias_C.index_fill(0, torch.tensor(0), 1e-3)).classes_TK
    moved = (nudged != routing.classes_TK).float().mean().item()
    assert 0 < moved < 0.1, "a balancing step of 1e-3 moves some tokens, not all"
