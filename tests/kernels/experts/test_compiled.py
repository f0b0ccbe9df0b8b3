"""The experts in graphs of torch.compile: operators that are what their fakes and gradients state."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.library import opcheck

from tests.kernels.experts.test_experts import LOADS, order_of
from zslurm.kernels import experts
from zslurm.kernels.dispatch import using
from zslurm.kernels.experts import choose, compiled, network, sort

TOKENS, CLASSES, EXPERTS = 12, 5, 4


def leaves_of(load: str, choices: int, dtype: torch.dtype = torch.float32) -> list[Tensor]:
    torch.manual_seed(0)
    tokens = len(LOADS[load]) // choices
    shapes = ((tokens, 16), (tokens, choices), (EXPERTS, 48, 16), (EXPERTS, 16, 24))
    drawn = [torch.randn(*shape, dtype=dtype) for shape in shapes]
    drawn[1] = torch.rand(tokens, choices)
    return [leaf.requires_grad_() for leaf in drawn]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("choices", [1, 2])
def test_the_choice_and_the_order_are_sound_operators(choices: int, dtype: torch.dtype) -> None:
    logits, bias = torch.randn(TOKENS, CLASSES, dtype=dtype, requires_grad=True), torch.randn(CLASSES)
    opcheck(compiled.choose, (logits, bias, choices))
    _, classes, probabilities = compiled.choose(logits, bias, choices)
    opcheck(compiled.choose_backward, (torch.randn(TOKENS, choices), classes, probabilities.detach(), dtype))
    opcheck(compiled.sort, (classes, CLASSES, EXPERTS))


@pytest.mark.parametrize("identity", [True, False])
@pytest.mark.parametrize("load", LOADS)
def test_the_network_is_a_sound_operator(load: str, identity: bool) -> None:
    choices = 2 if load == "two each" else 1
    order = order_of(LOADS[load], choices, EXPERTS)
    operands = (*leaves_of(load, choices), order.order_N, order.back_N, order.ends_E, identity)
    comparable = int(order.ends_E[-1]) == len(order.order_N)  # rows that skip have no first product
    checks = ["test_schema", "test_autograd_registration", "test_faketensor"]
    opcheck(
        compiled.network, operands, test_utils=[*checks, *(["test_aot_dispatch_dynamic"] if comparable else [])]
    )


def run(logits: Tensor, bias: Tensor, x: Tensor, gate_up: Tensor, down: Tensor) -> Tensor:
    classes, weights = choose(logits, bias, 2)
    order = sort(classes, CLASSES, EXPERTS)
    return network(x, weights, gate_up, down, order, True)


def test_a_graph_calls_what_runs_without_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a GPU; the results are equal bit by bit, forward and backward."""
    graphs: list[list[str]] = []

    def backend(graph: torch.fx.GraphModule, _: Any) -> Any:
        graphs.append([str(node.target) for node in graph.graph.nodes])
        return graph.forward

    torch.manual_seed(1)
    leaves = [
        torch.randn(TOKENS, CLASSES), torch.randn(CLASSES), torch.randn(TOKENS, 16),
        torch.randn(EXPERTS, 48, 16), torch.randn(EXPERTS, 16, 24),
    ]  # fmt: skip
    for leaf in (leaves[0], *leaves[2:]):
        leaf.requires_grad_()
    differentiated = [leaves[0], *leaves[2:]]
    monkeypatch.setattr(experts, "is_opaque", lambda x: True)
    results = []
    with using("experts.network", "reference"):
        for function in (run, torch.compile(run, backend=backend, fullgraph=True)):
            y = function(*leaves)
            results.append([y.detach(), *torch.autograd.grad(y.square().sum(), differentiated)])
    (calls,) = graphs
    wanted = ["experts_choose", "experts_sort", "experts_network"]
    assert [name for name in wanted if any(name in call for call in calls)] == wanted
    for eager, in_graph in zip(*results, strict=True):
        assert torch.equal(eager, in_graph)


def test_a_cpus_graph_is_made_of_torchs_operators() -> None:
    calls: list[str] = []

    def backend(graph: torch.fx.GraphModule, _: Any) -> Any:
        calls.extend(str(node.target) for node in graph.graph.nodes)
        return graph.forward

    leaves = torch.randn(TOKENS, CLASSES), torch.randn(CLASSES), *leaves_of("one each", 1)[2:]
    torch.compile(run, backend=backend, fullgraph=True)(*leaves[:2], torch.randn(TOKENS, 16), *leaves[2:])
    assert not any("experts" in call for call in calls)
