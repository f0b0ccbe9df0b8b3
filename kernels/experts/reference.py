"""Define, in plain torch and without waiting for the device, what routing and the experts' steps compute.

Every function is made of operators whose results have sizes that the host knows: none is indexed by a mask, and
nothing is read back.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


class Order(NamedTuple):
    """How N = T K choices are sorted by class; within a class they keep the order of the tokens.

    Attributes:
        order_N: the choice that each row holds, int64.
        back_N: the row of each choice, int64: the inverse permutation.
        counts_C: how many choices each class has, int64.
        ends_E: end of the rows of each expert, int32. The rows behind the last are the skip class's.
    """

    order_N: Tensor
    back_N: Tensor
    counts_C: Tensor
    ends_E: Tensor


def wide(x: Tensor) -> Tensor:
    """Return x in at least fp32."""
    return x if x.dtype == torch.float64 else x.float()


def choose(logits_TC: Tensor, bias_C: Tensor, choices: int) -> tuple[Tensor, Tensor, Tensor]:
    """Take the softmax over classes, and the K classes with the largest sum of probability and bias.

    The bias shifts the choice and never the weight (ZAYA1, arXiv 2605.05365; DeepSeek-V3, arXiv 2412.19437).
    """
    probabilities_TC = wide(logits_TC).softmax(dim=-1)
    preference_TC = probabilities_TC.detach() + bias_C
    classes_TK = preference_TC.topk(choices, dim=-1).indices
    return classes_TK, probabilities_TC.gather(-1, classes_TK), probabilities_TC


def choose_backward(
    grad_weights_TK: Tensor, classes_TK: Tensor, probabilities_TC: Tensor, dtype: torch.dtype
) -> Tensor:
    """Return the logits' gradient p (g - sum_c g_c p_c), where g is the weights' at the chosen classes, else 0."""
    grad_TC = torch.zeros_like(probabilities_TC).scatter_(-1, classes_TK, grad_weights_TK)
    along_T1 = (grad_TC * probabilities_TC).sum(dim=-1, keepdim=True)
    return (probabilities_TC * (grad_TC - along_T1)).to(dtype)


def sort(classes_TK: Tensor, classes: int, experts: int) -> Order:
    """Sort the choices by class."""
    sorted_N, order_N = classes_TK.flatten().sort(stable=True)
    ends_C = torch.searchsorted(sorted_N, torch.arange(classes, device=sorted_N.device), right=True)
    counts_C = ends_C.diff(prepend=ends_C.new_zeros(1))
    back_N = torch.empty_like(order_N).scatter_(0, order_N, torch.arange(len(order_N), device=order_N.device))
    return Order(order_N, back_N, counts_C, ends_C[:experts].int())


def gather(x_TD: Tensor, order_N: Tensor, choices: int) -> Tensor:
    """Return for each row the token that its choice is of."""
    return x_TD.index_select(0, order_N // choices if choices > 1 else order_N)


def activate(both_NO: Tensor, weights_N: Tensor) -> Tensor:
    """Return SwiGLU times the router's weight, w silu(gate) up (arXiv 2002.05202), rounded once."""
    gate_NF, up_NF = wide(both_NO).chunk(2, dim=-1)
    return (torch.nn.functional.silu(gate_NF) * up_NF * weights_N.unsqueeze(1)).to(both_NO.dtype)


def activate_backward(grad_NF: Tensor, both_NO: Tensor, weights_N: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return the activation again, and the gradients of what went into it and of the weights."""
    gate_NF, up_NF = wide(both_NO).chunk(2, dim=-1)
    silu_NF = torch.nn.functional.silu(gate_NF)
    active_NF, weight_N1 = silu_NF * up_NF, weights_N.unsqueeze(1)
    grad_weights_N = (wide(grad_NF) * active_NF).sum(dim=-1).to(weights_N.dtype)
    grad_active_NF = wide(grad_NF) * weight_N1
    grad_gate_NF = torch.ops.aten.silu_backward(grad_active_NF * up_NF, gate_NF)
    grad_both_NO = torch.cat([grad_gate_NF, grad_active_NF * silu_NF], dim=-1)
    return (active_NF * weight_N1).to(both_NO.dtype), grad_both_NO.to(both_NO.dtype), grad_weights_N


def combine(
    y_ND: Tensor, x_TD: Tensor, weights_TK: Tensor, back_N: Tensor, ends_E: Tensor, identity: bool
) -> Tensor:
    """Sum up each token's choices: the row of one that an expert has; of one that skips, w x or nothing."""
    back_TK = back_N.view(weights_TK.shape)
    skips_TK1 = (back_TK >= ends_E[-1]).unsqueeze(-1)
    y_TKD = y_ND.index_select(0, back_N).view(*back_TK.shape, x_TD.shape[1])
    skipped_TKD = wide(x_TD).unsqueeze(1) * weights_TK.unsqueeze(-1) if identity else y_TKD.new_zeros(())
    return torch.where(skips_TK1, skipped_TKD, wide(y_TKD)).sum(dim=1).to(x_TD.dtype)


def weights_backward(
    grad_weights_N: Tensor, grad_TD: Tensor, x_TD: Tensor, back_N: Tensor, ends_E: Tensor, identity: bool
) -> Tensor:
    """Return the gradient of the weights [T, K]: the rows' for an expert's; for one that skips, grad x or 0."""
    tokens = len(x_TD)
    back_TK = back_N.view(tokens, len(back_N) // max(1, tokens))
    of_skip_T1 = (wide(grad_TD) * wide(x_TD)).sum(dim=-1, keepdim=True) if identity else 0.0
    of_rows_TK = grad_weights_N.index_select(0, back_N).view(back_TK.shape)
    return torch.where(back_TK >= ends_E[-1], of_skip_T1, of_rows_TK).to(grad_weights_N.dtype)
