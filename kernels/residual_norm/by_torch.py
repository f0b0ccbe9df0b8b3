"""Compute RMSNorm of two scaled streams by few of torch's operators: what a CPU takes.

The biases are multiplied out, t = h a + r c + (b a + d c), so that each operator is one pass, most of them in
place. Backward takes one product for both of its sums: over rows, and with the weight over each row.
"""

from __future__ import annotations

import torch
from torch import Tensor

from zslurm.kernels.residual_norm.operands import NormOperands
from zslurm.kernels.residual_norm.reference import Gradients


def lacks(centered: bool, given: NormOperands) -> str | None:
    """Return what of a call this file does not take, or None."""
    if centered or given.bias is not None:
        return "LayerNorm or a bias behind the norm"
    if given.hidden_scale is None or (given.residual is not None and given.residual_scale is None):
        return "streams without scale and bias"
    return None


def forward(eps: float, centered: bool, *operands: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
    """Return x, t and the inverse roots, as the reference does."""
    operands_given = NormOperands(*operands)  # type: ignore[arg-type]
    assert operands_given.hidden_scale is not None
    assert operands_given.hidden_bias is not None
    wide, weight = operands_given.wide, operands_given.weight
    wide_scale = operands_given.hidden_scale.to(wide)
    shift = operands_given.hidden_bias * wide_scale
    if (
        operands_given.residual is not None
        and operands_given.residual_scale is not None
        and operands_given.residual_bias is not None
    ):
        shift.addcmul_(operands_given.residual_bias.to(wide), operands_given.residual_scale.to(wide))
    joined = torch.addcmul(shift, operands_given.hidden.to(wide), wide_scale)
    if operands_given.residual is not None and operands_given.residual_scale is not None:
        joined.addcmul_(operands_given.residual, operands_given.residual_scale.to(wide))
    inverse = torch.linalg.vector_norm(joined, dim=-1, keepdim=True)
    inverse = inverse.square_().div_(joined.shape[-1]).add_(eps).rsqrt_()
    x = (joined * inverse).mul_(weight.to(wide)).to(weight.dtype)
    return x, joined, inverse.view(1, -1)


def backward(
    grad_x: Tensor | None,
    grad_joined: Tensor | None,
    joined: Tensor,
    statistics: Tensor,
    *operands: Tensor | None,
) -> Gradients:
    """Return the gradients, as the reference does."""
    operands_given = NormOperands(*operands)  # type: ignore[arg-type]
    wide, grad_weight = operands_given.wide, None
    if grad_x is None:
        assert grad_joined is not None
        grad = grad_joined.clone()
    else:
        inverse = statistics.view(*joined.shape[:-1], 1)
        grad_x, wide_weight = grad_x.to(wide), operands_given.weight.to(wide)
        along = grad_x * joined  # one pass serves both sums: over rows, and with the weight over each row
        grad_weight = (inverse.flatten() @ along.flatten(0, -2)).to(operands_given.weight.dtype)
        along = (along @ wide_weight).unsqueeze(-1) * inverse.pow(3)
        grad = (grad_x * wide_weight).mul_(inverse)
        grad.addcmul_(joined, along, value=-1 / joined.shape[-1])
        if grad_joined is not None:
            grad += grad_joined
    total = _sum_rows(grad)
    of_hidden = _affine_backward(
        grad, total, operands_given.hidden, operands_given.hidden_scale, operands_given.hidden_bias
    )
    of_residual = _affine_backward(
        grad, total, operands_given.residual, operands_given.residual_scale, operands_given.residual_bias
    )
    return *of_hidden, *of_residual, grad_weight, None


def _affine_backward(
    grad: Tensor, total: Tensor, x: Tensor | None, scale: Tensor | None, bias: Tensor | None
) -> Gradients:
    """Return the gradients of (x + bias) scale; total is the gradient's sum over rows."""
    if x is None or scale is None or bias is None:
        return None, None, None
    wide_scale = scale.to(grad.dtype)
    grad_scale = _sum_rows(grad * x).addcmul_(total, bias.to(grad.dtype))
    return (grad * wide_scale).to(x.dtype), grad_scale.to(scale.dtype), (total * wide_scale).to(bias.dtype)


def _sum_rows(x: Tensor) -> Tensor:
    return x.flatten(0, -2).sum(dim=0)
