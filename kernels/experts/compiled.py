"""The experts as operators of `torch.compile`: what GPUs run in a graph, whose inside the compiler does not see.

Each dispatches when the graph runs, to the kernels that run without one. So a compiled model and an eager one make
the same launches for their experts.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from zslurm.kernels.experts import steps
from zslurm.kernels.experts.reference import Order

_Three = tuple[Tensor, Tensor, Tensor]
_Four = tuple[Tensor, Tensor, Tensor, Tensor]


@torch.library.custom_op("zslurm::experts_choose", mutates_args=())
def choose(logits_TC: Tensor, bias_C: Tensor, choices: int) -> _Three:
    """Return the probabilities of K classes of each token, these classes, and all probabilities."""
    classes_TK, weights_TK, probabilities_TC = steps.choose(logits_TC.contiguous(), bias_C.contiguous(), choices)
    return weights_TK, classes_TK, probabilities_TC


@choose.register_fake
def _(logits_TC: Tensor, bias_C: Tensor, choices: int) -> _Three:
    (tokens, classes), wide = logits_TC.shape, steps.wide(logits_TC.dtype)
    return (
        logits_TC.new_empty(tokens, choices, dtype=wide),
        logits_TC.new_empty(tokens, choices, dtype=torch.int64),
        logits_TC.new_empty(tokens, classes, dtype=wide),
    )


@torch.library.custom_op("zslurm::experts_choose_backward", mutates_args=())
def choose_backward(
    grad_weights_TK: Tensor, classes_TK: Tensor, probabilities_TC: Tensor, dtype: torch.dtype
) -> Tensor:
    """Return the gradient of the logits, in a format."""
    gradient_TC: Tensor = steps.choose_backward(
        grad_weights_TK.contiguous(), classes_TK.contiguous(), probabilities_TC.contiguous(), dtype
    )
    return gradient_TC


@choose_backward.register_fake
def _(grad_weights_TK: Tensor, classes_TK: Tensor, probabilities_TC: Tensor, dtype: torch.dtype) -> Tensor:
    return probabilities_TC.new_empty(probabilities_TC.shape, dtype=dtype)


def _keep_choice(ctx: Any, inputs: tuple[Any, ...], output: _Three) -> None:
    _, classes_TK, probabilities_TC = output
    ctx.save_for_backward(classes_TK, probabilities_TC)
    ctx.dtype = inputs[0].dtype
    ctx.mark_non_differentiable(classes_TK, probabilities_TC)


def _differentiate_choice(ctx: Any, grad_weights_TK: Tensor, *_: Any) -> tuple[Tensor, None, None]:
    return choose_backward(grad_weights_TK, *ctx.saved_tensors, ctx.dtype), None, None


choose.register_autograd(_differentiate_choice, setup_context=_keep_choice)


@torch.library.custom_op("zslurm::experts_sort", mutates_args=())
def sort(classes_TK: Tensor, classes: int, experts: int) -> _Four:
    """Return the order of the choices by class; its fields are those of `Order`."""
    order: Order = steps.sort(classes_TK.contiguous(), classes, experts)
    return order.order_N, order.back_N, order.counts_C, order.ends_E


@sort.register_fake
def _(classes_TK: Tensor, classes: int, experts: int) -> _Four:
    order_N = classes_TK.new_empty(classes_TK.numel())
    ends_E = classes_TK.new_empty(experts, dtype=torch.int32)
    return order_N, torch.empty_like(order_N), classes_TK.new_empty(classes), ends_E


@torch.library.custom_op("zslurm::experts_network", mutates_args=())
def network(
    x_TD: Tensor,
    weights_TK: Tensor,
    gate_up_EOD: Tensor,
    down_EDF: Tensor,
    order_N: Tensor,
    back_N: Tensor,
    ends_E: Tensor,
    identity: bool,
) -> tuple[Tensor, Tensor]:
    """Return the weighted sum of each token's experts, and the first product, which backward needs."""
    return steps.forward(
        x_TD.contiguous(), weights_TK.contiguous(), gate_up_EOD, down_EDF, order_N, back_N, ends_E, identity
    )


@network.register_fake
def _(x_TD: Tensor, weights_TK: Tensor, gate_up_EOD: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
    return x_TD.new_empty(x_TD.shape), x_TD.new_empty(weights_TK.numel(), gate_up_EOD.shape[1])


@torch.library.custom_op("zslurm::experts_network_backward", mutates_args=())
def network_backward(
    grad_TD: Tensor,
    x_TD: Tensor,
    weights_TK: Tensor,
    gate_up_EOD: Tensor,
    down_EDF: Tensor,
    order_N: Tensor,
    back_N: Tensor,
    ends_E: Tensor,
    both_NO: Tensor,
    identity: bool,
) -> _Four:
    """Return the gradients of the tokens, the router's weights, and both matrices."""
    x_TD, weights_TK = x_TD.contiguous(), weights_TK.contiguous()
    kept = x_TD, weights_TK, gate_up_EOD, down_EDF, order_N, back_N, ends_E, both_NO
    grad_x_TD, grad_weights_TK, grad_gate_up_EOD, grad_down_EDF = steps.backward(
        grad_TD.contiguous(), *kept, identity
    )
    assert grad_gate_up_EOD is not None
    assert grad_down_EDF is not None
    return grad_x_TD, grad_weights_TK, grad_gate_up_EOD, grad_down_EDF


@network_backward.register_fake
def _(grad_TD: Tensor, x_TD: Tensor, weights_TK: Tensor, gate_up_EOD: Tensor, down_EDF: Tensor, *_: Any) -> _Four:
    x, weights, gate_up, down = (
        operand.new_empty(operand.shape) for operand in (x_TD, weights_TK, gate_up_EOD, down_EDF)
    )
    return x, weights, gate_up, down


def _keep_network(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    *tensors, identity = inputs
    _, both_NO = output
    ctx.save_for_backward(*tensors, both_NO)
    ctx.identity = identity
    ctx.mark_non_differentiable(both_NO)


def _differentiate_network(ctx: Any, grad_TD: Tensor, _: Any) -> tuple[Tensor | None, ...]:
    gradients = network_backward(grad_TD, *ctx.saved_tensors, ctx.identity)
    return *gradients, None, None, None, None


network.register_autograd(_differentiate_network, setup_context=_keep_network)
