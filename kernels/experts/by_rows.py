"""Run the experts on rows that are sorted, multiplied and sorted back by autograd functions: fastest on CPUs.

Only permutations move rows, forward and backward, so no sum depends on the order of atomic additions. The expert
network is one autograd function: of its inside it keeps the first product and recomputes the activation from it.
torch's compiler can see through all of it.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from zslurm.kernels.experts.reference import Order
from zslurm.kernels.experts.steps import ExpertSums, gradient_or_sum
from zslurm.kernels.grouped_gemm import Groups, multiply


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
    choices = weights_TK.shape[1]
    order_N, back_N = order.order_N, order.back_N
    x_ND = _SortRows.apply(x_TD, order_N, back_N, choices)  # type: ignore[no-untyped-call]  # torch's
    groups = Groups(order.ends_E)
    y_ND = _ExpertNetwork.apply(x_ND, gate_up_EOD, down_EDF, groups, identity, sums)  # type: ignore[no-untyped-call]
    back_ND: Tensor = _Permute.apply(y_ND, back_N, order_N)  # type: ignore[no-untyped-call]  # torch's
    y_TKD = back_ND.view(len(x_TD), choices, x_TD.shape[1])
    weights_TK1 = weights_TK.to(y_TKD.dtype).unsqueeze(-1)
    return (y_TKD * weights_TK1).sum(dim=1) if choices > 1 else y_TKD.squeeze(1) * weights_TK1.squeeze(1)


class _SortRows(torch.autograd.Function):
    """Row n of the result is the token of choice order_N[n]; backward is the way back and a sum over choices."""

    @staticmethod
    def forward(ctx: Any, x_TD: Tensor, order_N: Tensor, back_N: Tensor, choices: int) -> Tensor:
        ctx.save_for_backward(back_N)
        ctx.choices = choices
        return x_TD.index_select(0, order_N // choices if choices > 1 else order_N)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_ND: Tensor) -> tuple[Tensor, None, None, None]:
        (back_N,) = ctx.saved_tensors
        grad_ND = grad_ND.index_select(0, back_N)
        if ctx.choices > 1:
            grad_ND = grad_ND.view(-1, ctx.choices, grad_ND.shape[1]).sum(dim=1)
        return grad_ND, None, None, None


class _Permute(torch.autograd.Function):
    """Row n of the result is row order_N[n]; back_N is the inverse permutation."""

    @staticmethod
    def forward(ctx: Any, x_ND: Tensor, order_N: Tensor, back_N: Tensor) -> Tensor:
        ctx.save_for_backward(back_N)
        return x_ND.index_select(0, order_N)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_ND: Tensor) -> tuple[Tensor, None, None]:
        (back_N,) = ctx.saved_tensors
        return grad_ND.index_select(0, back_N), None, None


class _ExpertNetwork(torch.autograd.Function):
    """down(silu(gate(x)) * up(x)) for the groups' rows; the rows behind them are passed on, or zero."""

    @staticmethod
    def forward(
        ctx: Any,
        x_ND: Tensor,
        gate_up_EOD: Tensor,
        down_EDF: Tensor,
        groups: Groups,
        pass_on: bool,
        sums: ExpertSums | None,
    ) -> Tensor:
        both_NO = multiply(x_ND, gate_up_EOD.mT, groups)
        y_ND = multiply(_activate(both_NO), down_EDF.mT, groups)
        ctx.save_for_backward(x_ND, gate_up_EOD, down_EDF, both_NO)
        ctx.groups, ctx.pass_on, ctx.sums = groups, pass_on, sums
        return _fill_rest(y_ND, x_ND, groups, pass_on)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_ND: Tensor) -> tuple[Tensor | None, ...]:
        x_ND, gate_up_EOD, down_EDF, both_NO = ctx.saved_tensors
        groups, sums = ctx.groups, ctx.sums
        grad_ND = grad_ND.contiguous()  # kernels refuse expanded gradients
        grad_active_NF = multiply(grad_ND, down_EDF, groups)
        active_NF, grad_both_NO = _activate_again(grad_active_NF, both_NO)
        grad_down_EDF = gradient_or_sum(grad_ND, active_NF, groups, sums and sums.down)
        grad_gate_up_EOD = gradient_or_sum(grad_both_NO, x_ND, groups, sums and sums.gate_up)
        grad_x_ND = multiply(grad_both_NO, gate_up_EOD, groups)
        grad_x_ND = _fill_rest(grad_x_ND, grad_ND, groups, ctx.pass_on)
        return grad_x_ND, grad_gate_up_EOD, grad_down_EDF, None, None, None


def _activate(both_NO: Tensor) -> Tensor:
    gate_NF, up_NF = both_NO.chunk(2, dim=-1)
    return F.silu(gate_NF).mul_(up_NF)


def _activate_again(grad_NF: Tensor, both_NO: Tensor) -> tuple[Tensor, Tensor]:
    """Return the activation again, and the gradient of what went into it."""
    gate_NF, up_NF = both_NO.chunk(2, dim=-1)
    silu_NF = F.silu(gate_NF)
    grad_gate_NF = torch.ops.aten.silu_backward(grad_NF * up_NF, gate_NF)
    return silu_NF * up_NF, torch.cat([grad_gate_NF, grad_NF * silu_NF], dim=-1)


def _fill_rest(y_ND: Tensor, x_ND: Tensor, groups: Groups, pass_on: bool) -> Tensor:
    """Define the rows behind the last group: those of x, or zero."""
    if not groups.on_host:
        is_rest_N1 = (torch.arange(len(y_ND), device=y_ND.device) >= groups.ends_E[-1]).unsqueeze(1)
        return torch.where(is_rest_N1, x_ND, y_ND) if pass_on else y_ND.masked_fill(is_rest_N1, 0)
    unused_rows = slice(sum(groups.rows()), None)
    if pass_on:
        y_ND[unused_rows] = x_ND[unused_rows]
    else:
        y_ND[unused_rows] = 0
    return y_ND
