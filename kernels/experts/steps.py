"""Run the experts by this folder's steps and the grouped products: what GPUs run, without waiting for the device.

Kept for backward are the tokens, which others keep as well, and the first product. The gathered rows are gathered
again there, and the router's weights get their gradient from the activation's, so that results are not needed.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from zslurm.kernels.checks import short
from zslurm.kernels.dispatch import Operation, Sizes, in_triton, on_gpus
from zslurm.kernels.experts import operands, reference
from zslurm.kernels.experts.reference import Order
from zslurm.kernels.experts.sums import ExpertSums, gradient_or_sum
from zslurm.kernels.grouped_gemm import Groups, multiply


def operation(name: str, check: Callable[..., None], sizes: Callable[..., Sizes]) -> Operation:
    """Return an operation of this folder, whose implementations have functions of one name."""
    return Operation(
        name=f"experts.{name}",
        reference=getattr(reference, name),
        candidates=[(on_gpus, in_triton("experts", name, operands.lacks_in_triton))],
        check=check,
        device=lambda first, *_: first.device,
        sizes=sizes,
    )


def _rows(first: Tensor, *_: Any) -> Sizes:
    return {"dtype": short(first.dtype), "rows": len(first), "width": first.shape[-1]}


def _choices(first: Tensor, *_: Any) -> Sizes:
    return {"dtype": short(first.dtype), "tokens": len(first)}


_route, _step = partial(operation, sizes=_choices), partial(operation, sizes=_rows)
choose = _route("choose", operands.check_choose)
choose_backward = _route("choose_backward", operands.check_choose_backward)
sort = _route("sort", operands.check_sort)
gather = _step("gather", operands.check_gather)
activate = _step("activate", operands.check_activate)
activate_backward = _step("activate_backward", operands.check_activate_backward)
combine = _step("combine", operands.check_combine)
weights_backward = _step("weights_backward", operands.check_weights_backward)


def network(
    x_TD: Tensor,
    weights_TK: Tensor,
    gate_up_EOD: Tensor,
    down_EDF: Tensor,
    order: Order,
    identity: bool,
    sums: ExpertSums | None = None,
) -> Tensor:
    """Return the weighted sum of each token's experts; of a choice that skips, the token itself, or zero."""
    operands_of_order = order.order_N, order.back_N, order.ends_E
    y_TD: Tensor = _Network.apply(  # type: ignore[no-untyped-call]  # torch's
        x_TD.contiguous(), weights_TK.contiguous(), gate_up_EOD, down_EDF, *operands_of_order, identity, sums
    )
    return y_TD


def forward(
    x_TD: Tensor,
    weights_TK: Tensor,
    gate_up_EOD: Tensor,
    down_EDF: Tensor,
    order_N: Tensor,
    back_N: Tensor,
    ends_E: Tensor,
    identity: bool,
) -> tuple[Tensor, Tensor]:
    """Return the weighted sum of each token's experts, and the first product, which `backward` needs."""
    groups = Groups(ends_E)
    x_ND = gather(x_TD, order_N, weights_TK.shape[1])
    both_NO = multiply(x_ND, gate_up_EOD.mT, groups)
    del x_ND
    active_NF = activate(both_NO, weights_TK.flatten().index_select(0, order_N))
    y_ND = multiply(active_NF, down_EDF.mT, groups)
    return combine(y_ND, x_TD, weights_TK, back_N, ends_E, identity), both_NO


def backward(
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
    sums: ExpertSums | None = None,
) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None]:
    """Return the gradients of the tokens, the router's weights and both matrices, None for what has a sum."""
    groups, choices = Groups(ends_E), weights_TK.shape[1]
    grad_ND = gather(grad_TD, order_N, choices)
    grad_active_NF = multiply(grad_ND, down_EDF, groups)
    weights_N = weights_TK.flatten().index_select(0, order_N)
    active_NF, grad_both_NO, grad_weights_N = activate_backward(grad_active_NF, both_NO, weights_N)
    del grad_active_NF
    grad_down_EDF = gradient_or_sum(grad_ND, active_NF, groups, sums and sums.down)
    del grad_ND, active_NF
    x_ND = gather(x_TD, order_N, choices)
    grad_gate_up_EOD = gradient_or_sum(grad_both_NO, x_ND, groups, sums and sums.gate_up)
    del x_ND
    grad_rows_ND = multiply(grad_both_NO, gate_up_EOD, groups)
    grad_x_TD = combine(grad_rows_ND, grad_TD, weights_TK, back_N, ends_E, identity)
    grad_weights_TK = weights_backward(grad_weights_N, grad_TD, x_TD, back_N, ends_E, identity)
    return grad_x_TD, grad_weights_TK, grad_gate_up_EOD, grad_down_EDF


class _Network(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, *arguments: Any) -> Tensor:
        *tensors, identity, sums = arguments
        y_TD, both_NO = forward(*arguments[:-1])
        ctx.save_for_backward(*tensors, both_NO)
        ctx.identity, ctx.sums = identity, sums
        return y_TD

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_TD: Tensor) -> tuple[Tensor | None, ...]:
        # Kernels refuse expanded gradients.
        arguments: tuple[Any, ...] = (grad_TD.contiguous(), *ctx.saved_tensors, ctx.identity, ctx.sums)
        return *backward(*arguments), None, None, None, None, None
