"""Root-mean-square normalisation, and the entry of a stage: residual scaling, addition, norm.

An entry is one pass over the residual stream, and is kept as one module so that one fused kernel can do it.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from zslurm.train.model.precision import at_least_fp32


class RMSNorm(nn.Module):
    """x / sqrt(mean(x^2) + eps) * weight over the last dimension, in fp32, given in the weight's format."""

    def __init__(self, width: int, eps: float, dtype: torch.dtype) -> None:
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.empty(width, dtype=dtype))

    def forward(self, x: Tensor) -> Tensor:
        """Normalise the last dimension, in at least fp32."""
        x = at_least_fp32(x)
        y = F.rms_norm(x, self.weight.shape, self.weight.to(x.dtype), self.eps)
        return y.to(self.weight.dtype)


class StageEntry(nn.Module):
    """Adds what the stage before wrote to the residual stream, and normalises the sum for this stage.

        residual <- (hidden + hidden_bias) * hidden_scale + (residual + residual_bias) * residual_scale
        x        <- RMSNorm(residual)

    The first entry of the model has no residual stream yet and starts it.
    """

    def __init__(self, width: int, eps: float, dtype: torch.dtype, *, first: bool = False) -> None:
        super().__init__()
        self.hidden_scale = nn.Parameter(torch.empty(width, dtype=dtype))
        self.hidden_bias = nn.Parameter(torch.empty(width, dtype=dtype))
        if not first:
            self.residual_scale = nn.Parameter(torch.empty(width, dtype=dtype))
            self.residual_bias = nn.Parameter(torch.empty(width, dtype=dtype))
        self.norm = RMSNorm(width, eps, dtype)

    def forward(self, hidden_BSD: Tensor, residual_BSD: Tensor | None) -> tuple[Tensor, Tensor]:
        """Return the stage's input in the parameters' format, and the residual stream in at least fp32."""
        residual: tuple[Tensor | None, Tensor | None, Tensor | None] = (None, None, None)
        if residual_BSD is not None:
            residual = residual_BSD, self.residual_scale, self.residual_bias
        x_BSD, joined_BSD = _Join.apply(
            hidden_BSD, self.hidden_scale, self.hidden_bias, *residual, self.norm.weight, self.norm.eps
        )
        return x_BSD, joined_BSD


class _Join(torch.autograd.Function):
    """t = (h + b) a + (r + d) c; x = t w / rms(t). Keeps h, r and one number per row; t is its own result."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        hidden_scale: Tensor,
        hidden_bias: Tensor,
        residual: Tensor | None,
        residual_scale: Tensor | None,
        residual_bias: Tensor | None,
        weight: Tensor,
        eps: float,
    ) -> tuple[Tensor, Tensor]:
        wide_scale = at_least_fp32(hidden_scale)
        shift = hidden_bias * wide_scale
        if residual is not None and residual_scale is not None and residual_bias is not None:
            shift.addcmul_(at_least_fp32(residual_bias), at_least_fp32(residual_scale))
        joined = torch.addcmul(shift, at_least_fp32(hidden), wide_scale)
        if residual is not None and residual_scale is not None:
            joined.addcmul_(residual, at_least_fp32(residual_scale))
        inverse = torch.linalg.vector_norm(joined, dim=-1, keepdim=True)
        inverse = inverse.square_().div_(joined.shape[-1]).add_(eps).rsqrt_()
        x = (joined * inverse).mul_(at_least_fp32(weight)).to(weight.dtype)
        ctx.save_for_backward(
            hidden, hidden_scale, hidden_bias, residual, residual_scale, residual_bias, weight, joined, inverse
        )
        ctx.set_materialize_grads(False)
        return x, joined

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_x: Tensor | None, grad_joined: Tensor | None) -> tuple[Tensor | None, ...]:
        hidden, hidden_scale, hidden_bias, residual, residual_scale, residual_bias, weight, joined, inverse = (
            ctx.saved_tensors
        )
        grad_weight = None
        if grad_x is None:
            assert grad_joined is not None
            grad = grad_joined.clone()
        else:
            grad_x, wide_weight = at_least_fp32(grad_x), at_least_fp32(weight)
            along = grad_x * joined  # one pass serves both sums: over rows, and with the weight over each row
            grad_weight = (inverse.flatten() @ along.flatten(0, -2)).to(weight.dtype)
            along = (along @ wide_weight).unsqueeze(-1) * inverse.pow(3)
            grad = (grad_x * wide_weight).mul_(inverse)
            grad.addcmul_(joined, along, value=-1 / joined.shape[-1])
            if grad_joined is not None:
                grad += grad_joined
        total = _sum_rows(grad)
        of_hidden = _affine_backward(grad, total, hidden, hidden_scale, hidden_bias)
        of_residual: tuple[Tensor | None, ...] = (None, None, None)
        if residual is not None:
            of_residual = _affine_backward(grad, total, residual, residual_scale, residual_bias)
        return *of_hidden, *of_residual, grad_weight, None


def _sum_rows(x: Tensor) -> Tensor:
    return x.flatten(0, -2).sum(dim=0)


def _affine_backward(
    grad: Tensor, total: Tensor, x: Tensor, scale: Tensor, bias: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of (x + bias) scale with respect to x, scale and bias; total is the gradient's sum over rows."""
    wide_scale = at_least_fp32(scale)
    grad_scale = _sum_rows(grad * x).addcmul_(total, at_least_fp32(bias))
    return (grad * wide_scale).to(x.dtype), grad_scale.to(scale.dtype), (total * wide_scale).to(bias.dtype)
