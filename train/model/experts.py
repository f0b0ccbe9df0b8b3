"""The experts: SwiGLU networks, each applied to the tokens routed to it. No token is ever dropped.

Tokens are sorted by class, so that each expert's rows are together and the skip class, being the last, at the
end. Only permutations move rows, forward and backward, so no sum depends on the order of atomic additions.

Cost beyond the matrix products: two permutations of T*K rows of D. The products are those of
`kernels/grouped_gemm`: where they run in a loop, the host waits for the device once per layer, to learn how many
rows each expert has. The expert network is one autograd function: of its inside it keeps the first product and
recomputes the activation from it.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from zslurm.kernels.grouped_gemm import Groups, multiply, weight_gradient
from zslurm.train.config import ModelConfig
from zslurm.train.model.router import Routing


class Dispatch(NamedTuple):
    """The order in which rows are sorted by class, and how many rows each class has (both int64)."""

    order_N: Tensor
    counts_C: Tensor


def dispatch_by_class(classes_TK: Tensor, classes: int) -> Dispatch:
    """Sort the T*K choices by class, keeping the order of tokens within a class."""
    sorted_N, order_N = classes_TK.flatten().sort(stable=True)
    ends_C = torch.searchsorted(sorted_N, torch.arange(classes, device=sorted_N.device), right=True)
    return Dispatch(order_N, ends_C.diff(prepend=ends_C.new_zeros(1)))


class StackedLinear(nn.Module):
    """One linear map per expert, without biases, in one tensor [experts, outputs, inputs]."""

    def __init__(self, experts: int, inputs: int, outputs: int, dtype: torch.dtype) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(experts, outputs, inputs, dtype=dtype))


class Experts(nn.Module):
    """Sends tokens to their experts and adds up what comes back, weighted by the router."""

    def __init__(self, config: ModelConfig, dtype: torch.dtype) -> None:
        super().__init__()
        self.experts = config.experts
        self.classes = config.router_classes
        self.skip_rule = config.skip_rule
        hidden, inner = config.hidden_size, config.expert_hidden_size
        self.gate_up = StackedLinear(config.experts, hidden, 2 * inner, dtype)
        self.down = StackedLinear(config.experts, inner, hidden, dtype)

    def forward(self, x_TD: Tensor, routing: Routing, valid_T: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Return the weighted sum of each token's experts, and each class's number of choices [C], int64.

        Tokens where `valid_T` is false (padding) are computed, but not counted.
        """
        choices = routing.classes_TK.shape[1]
        order_N, counts_C = dispatch_by_class(routing.classes_TK, self.classes)
        back_N = torch.empty_like(order_N).scatter_(0, order_N, torch.arange(len(order_N), device=order_N.device))
        groups = Groups(counts_C[: self.experts].cumsum(0).int())
        x_ND = _SortRows.apply(x_TD, order_N, back_N, choices)
        y_ND = _ExpertNetwork.apply(
            x_ND, self.gate_up.weight, self.down.weight, groups, self.skip_rule == "identity"
        )
        y_TKD = _Permute.apply(y_ND, back_N, order_N).unflatten(0, (-1, choices))
        weights_TK1 = routing.weights_TK.to(y_TKD.dtype).unsqueeze(-1)
        y_TD = (y_TKD * weights_TK1).sum(dim=1) if choices > 1 else y_TKD.squeeze(1) * weights_TK1.squeeze(1)
        if valid_T is not None:
            # The sum over a mask, not a selection: its size would have to be asked of the device.
            chosen_TKC = routing.classes_TK.unsqueeze(-1) == torch.arange(self.classes, device=x_TD.device)
            counts_C = (chosen_TKC & valid_T[:, None, None]).sum(dim=(0, 1))
        return y_TD, counts_C


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
        return grad_ND.unflatten(0, (-1, ctx.choices)).sum(dim=1) if ctx.choices > 1 else grad_ND, None, None, None


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
        ctx: Any, x_ND: Tensor, gate_up_EOD: Tensor, down_EDF: Tensor, groups: Groups, pass_on: bool
    ) -> Tensor:
        both_NO = multiply(x_ND, gate_up_EOD.mT, groups)
        y_ND = multiply(_activate(both_NO), down_EDF.mT, groups)
        ctx.save_for_backward(x_ND, gate_up_EOD, down_EDF, both_NO)
        ctx.groups, ctx.pass_on = groups, pass_on
        return _fill_rest(y_ND, x_ND, groups, pass_on)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_ND: Tensor) -> tuple[Tensor, Tensor, Tensor, None, None]:
        x_ND, gate_up_EOD, down_EDF, both_NO = ctx.saved_tensors
        groups = ctx.groups
        grad_ND = grad_ND.contiguous()  # kernels refuse expanded gradients
        grad_active_NF = multiply(grad_ND, down_EDF, groups)
        active_NF, grad_both_NO = _activate_again(grad_active_NF, both_NO)
        grad_down_EDF = weight_gradient(grad_ND, active_NF, groups)
        grad_gate_up_EOD = weight_gradient(grad_both_NO, x_ND, groups)
        grad_x_ND = multiply(grad_both_NO, gate_up_EOD, groups)
        return _fill_rest(grad_x_ND, grad_ND, groups, ctx.pass_on), grad_gate_up_EOD, grad_down_EDF, None, None


def _activate(both_NO: Tensor) -> Tensor:
    gate_NF, up_NF = both_NO.chunk(2, dim=-1)
    return F.silu(gate_NF).mul_(up_NF)


def _activate_again(grad_NF: Tensor, both_NO: Tensor) -> tuple[Tensor, Tensor]:
    """Return the activation once more, and the gradient of what went into it."""
    gate_NF, up_NF = both_NO.chunk(2, dim=-1)
    silu_NF = F.silu(gate_NF)
    grad_gate_NF = torch.ops.aten.silu_backward(grad_NF * up_NF, gate_NF)
    return silu_NF * up_NF, torch.cat([grad_gate_NF, grad_NF * silu_NF], dim=-1)


def _fill_rest(y_ND: Tensor, x_ND: Tensor, groups: Groups, pass_on: bool) -> Tensor:
    """Define the rows behind the last group: those of x, or zero."""
    if not groups.on_host:
        is_rest_N1 = (torch.arange(len(y_ND), device=y_ND.device) >= groups.ends_E[-1]).unsqueeze(1)
        return torch.where(is_rest_N1, x_ND, y_ND) if pass_on else y_ND.masked_fill(is_rest_N1, 0)
    rest = slice(sum(groups.rows()), None)
    if pass_on:
        y_ND[rest] = x_ND[rest]
    else:
        y_ND[rest] = 0
    return y_ND
