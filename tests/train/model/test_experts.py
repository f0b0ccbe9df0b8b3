"""Dispatch and experts: against a loop over tokens, both skip rules, empty experts."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from tests.train.models import random_like, scrambled, tiny_config
from zslurm.kernels.dispatch import using
from zslurm.kernels.experts import sort
from zslurm.train.model.experts import Experts
from zslurm.train.model.router import Routing


def experts_of(**changes: Any) -> Experts:
    experts: Experts = scrambled(tiny_config(**changes)).layers[0].experts
    return experts


def routing_to(classes: list[list[int]]) -> Routing:
    classes_TK = torch.tensor(classes)
    weights_TK = random_like(classes_TK, "weights").abs()
    return Routing(classes_TK, weights_TK, state_TR=torch.empty(0))


def inputs(rows: int) -> Tensor:
    return random_like(torch.empty(rows, 12), "experts")


def token_by_token(experts: Experts, x_TD: Tensor, routing: Routing) -> Tensor:
    rows = []
    for x, classes, weights in zip(x_TD, routing.classes_TK.tolist(), routing.weights_TK, strict=True):
        row = torch.zeros_like(x)
        for chosen, weight in zip(classes, weights, strict=True):
            if chosen < experts.experts:
                gate, up = (experts.gate_up.weight[chosen] @ x).chunk(2)
                row = row + weight * (experts.down.weight[chosen] @ (F.silu(gate) * up))
            elif experts.skip_rule == "identity":
                row = row + weight * x
        rows.append(row)
    return torch.stack(rows)


ROUTINGS = {
    "one each": [[2], [0], [3], [1], [0], [2]],
    "two each": [[2, 3], [0, 1], [3, 0], [1, 2], [0, 3]],
    "one expert gets all": [[1]] * 5,
    "all skip": [[3]] * 4,
    "a single token": [[2]],
}


@pytest.mark.parametrize("skip_rule", ["identity", "zero"])
@pytest.mark.parametrize("classes", ROUTINGS.values(), ids=ROUTINGS.keys())
def test_outputs_and_gradients_are_those_of_a_loop_over_tokens(classes: list[list[int]], skip_rule: str) -> None:
    experts = experts_of(skip_rule=skip_rule, experts_per_token=len(classes[0]))
    routing = routing_to(classes)
    leaves = [
        inputs(len(classes)).requires_grad_(),
        routing.weights_TK.requires_grad_(),
        *experts.parameters(),
    ]
    y_TD, counts_C = experts(leaves[0], routing)
    expected = token_by_token(experts, leaves[0], routing)
    torch.testing.assert_close(y_TD, expected)
    assert counts_C.tolist() == [sum(row.count(c) for row in classes) for c in range(4)]

    direction = random_like(y_TD, "direction")
    ours = torch.autograd.grad((y_TD * direction).sum(), leaves)
    theirs = torch.autograd.grad((expected * direction).sum() + 0 * sum(p.sum() for p in leaves), leaves)
    for one, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(one, other)


def test_a_skipped_token_gets_its_input_or_nothing() -> None:
    x_TD, routing = inputs(3), routing_to([[3]] * 3)
    y_TD, _ = experts_of(skip_rule="identity")(x_TD, routing)
    torch.testing.assert_close(y_TD, routing.weights_TK * x_TD)
    y_TD, _ = experts_of(skip_rule="zero")(x_TD, routing)
    assert (y_TD == 0).all()


def test_without_a_skip_class_the_last_class_is_an_expert() -> None:
    y_TD, counts_C = experts_of(skip_expert=False)(inputs(2), routing_to([[2], [2]]))
    assert counts_C.tolist() == [0, 0, 2]
    assert (y_TD != 0).all()


def test_no_token_is_dropped_however_many_go_to_one_expert() -> None:
    y_TD, _ = experts_of()(inputs(500), routing_to([[1]] * 500))
    assert (y_TD.abs().amax(dim=-1) > 0).all()


@settings(max_examples=50, deadline=None)
@given(st.lists(st.integers(0, 5), min_size=1, max_size=40))
def test_dispatch_sorts_by_class_and_keeps_the_order_of_tokens(classes: list[int]) -> None:
    dispatch = sort(torch.tensor(classes).unsqueeze(1), classes=6, experts=5)
    assert dispatch.order_N.tolist() == sorted(range(len(classes)), key=lambda token: classes[token])
    assert dispatch.counts_C.tolist() == [classes.count(c) for c in range(6)]


@pytest.mark.parametrize("skip_rule", ["identity", "zero"])
@pytest.mark.parametrize("classes", ROUTINGS.values(), ids=ROUTINGS.keys())
def test_grouped_mm_gives_what_the_loop_gives(
    classes: list[list[int]], skip_rule: str, caplog: pytest.LogCaptureFixture
) -> None:
    config = tiny_config(
        hidden_size=16, expert_hidden_size=24, skip_rule=skip_rule, experts_per_token=len(classes[0])
    )
    experts: Experts = scrambled(config, torch.float32).layers[0].experts
    results = []
    for implementation in ("reference", "torch"):
        weights_TK = (
            random_like(torch.empty(len(classes), len(classes[0])), "weights").abs().float().requires_grad_()
        )
        routing = Routing(torch.tensor(classes), weights_TK, state_TR=torch.empty(0))
        x_TD = random_like(torch.empty(len(classes), 16), "experts").float().requires_grad_()
        leaves = [x_TD, weights_TK, *experts.parameters()]
        with using("grouped_gemm", implementation):
            y_TD, counts_C = experts(x_TD, routing)
            # The sum's gradient is expanded (stride 0), which grouped_mm's own backward would refuse.
            results.append([y_TD, counts_C, *torch.autograd.grad(y_TD.sum(), leaves)])
    for loop, grouped in zip(*results, strict=True):
        torch.testing.assert_close(grouped, loop)
    assert not caplog.messages, "both took all that they got"
