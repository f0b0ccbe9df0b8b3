"""Join two streams by scale and bias, and normalise their sum: what opens every stage of ZAYA1.

    residual_norm(hidden, weight, eps, ...)     x, t with t = (h + b) a + (r + d) c, x = RMSNorm or LayerNorm of t
    norm(x, weight, eps, ...)                   the norm alone

Both are differentiable once. Scales and biases, the residual stream and the norm's own bias may be left out.
Everything is computed in fp32 (fp64 for fp64); x has the weight's format, t is fp32 at least.

    reference       plain torch: reference.py has the formulas
    torch           the same for RMSNorm of scaled streams in fewer passes: what a CPU takes
    triton          one kernel forward, two backward: the rows, and the sum of the partial gradients of scales,
                    biases and weights, without atomics: the same bits every time on one card

Per element of bf16 hidden states and an fp32 stream, the kernels move 12 bytes forward and 18 backward. A row's
squares are added up in fp32: if elements exceed about 1e19 the root is infinite, in every implementation.

On a CPU `norm` is torch's operator. Under `torch.compile` a CPU's passes are traced, for the compiler to fuse; on
a GPU each direction is one operator, whose inside the compiler does not see.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from zslurm.kernels.residual_norm import compiled, operations
from zslurm.kernels.residual_norm.operands import NormOperands
from zslurm.kernels.residual_norm.operations import OPERATIONS

__all__ = ["OPERATIONS", "norm", "residual_norm"]

Affine = tuple[Tensor, Tensor]
"""Scale and bias [D] of a stream: (x + bias) scale."""


def residual_norm(
    hidden: Tensor,
    weight: Tensor,
    eps: float,
    *,
    hidden_affine: Affine | None = None,
    residual: Tensor | None = None,
    residual_affine: Affine | None = None,
    bias: Tensor | None = None,
    centered: bool = False,
) -> tuple[Tensor, Tensor]:
    """Return the norm of both streams' sum, in the weight's format, and the sum, in fp32 at least.

    Args:
        hidden: [..., D].
        weight: [D].
        eps: added under the root.
        hidden_affine: scale and bias of hidden.
        residual: the residual stream, of the shape of hidden, or None.
        residual_affine: scale and bias of the residual stream.
        bias: [D], added behind the weight.
        centered: LayerNorm instead of RMSNorm.

    Raises:
        ValueError: the operands do not fit.
    """
    hidden_scale, hidden_bias = hidden_affine or (None, None)
    residual_scale, residual_bias = residual_affine or (None, None)
    operands = NormOperands(
        hidden, hidden_scale, hidden_bias, residual, residual_scale, residual_bias, weight, bias
    )
    if not operands.joins:
        return norm(hidden, weight, eps, bias=bias, centered=centered), hidden.to(operands.wide)
    x, joined = _ResidualNorm.apply(eps, centered, *operands)  # type: ignore[no-untyped-call]
    return x, joined


def norm(x: Tensor, weight: Tensor, eps: float, *, bias: Tensor | None = None, centered: bool = False) -> Tensor:
    """Return RMSNorm, or centered LayerNorm, over the last dimension [D], in the weight's format."""
    if x.device.type == "cpu":
        return _norm_on_cpu(x, weight, eps, bias, centered)
    rows = x.unsqueeze(0) if x.dim() == 1 else x
    operands = NormOperands(rows, None, None, None, None, None, weight, bias)
    normed, _ = _ResidualNorm.apply(eps, centered, *operands)  # type: ignore[no-untyped-call]
    return normed.view_as(x)  # type: ignore[no-any-return]


def _norm_on_cpu(x: Tensor, weight: Tensor, eps: float, bias: Tensor | None, centered: bool) -> Tensor:
    x = x if x.dtype == torch.float64 else x.float()
    wide_weight = weight.to(x.dtype)
    if centered:
        y = F.layer_norm(x, weight.shape, wide_weight, None if bias is None else bias.to(x.dtype), eps)
    else:
        y = F.rms_norm(x, weight.shape, wide_weight, eps)
        y = y if bias is None else y + bias
    return y.to(weight.dtype)


class _ResidualNorm(torch.autograd.Function):
    """Keeps both streams, t and one number per row, two for LayerNorm; t is its own result."""

    @staticmethod
    def forward(ctx: Any, eps: float, centered: bool, *operands: Tensor | None) -> tuple[Tensor, Tensor]:
        ctx.eps, ctx.centered = eps, centered
        operands_given = NormOperands(*operands)  # type: ignore[arg-type]
        run = (
            compiled.forward_of(centered, operands_given) if torch.compiler.is_compiling() else operations.forward
        )
        x, joined, statistics = run(eps, centered, *operands)
        ctx.save_for_backward(joined, statistics, *operands)
        ctx.set_materialize_grads(False)
        return x, joined

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_x: Tensor | None, grad_joined: Tensor | None) -> tuple[Tensor | None, ...]:
        joined, statistics, *tensors = ctx.saved_tensors
        operands = NormOperands(*tensors)
        if not operands.joins:
            grad_joined = None  # of a result without elements
        if grad_x is None and grad_joined is None:
            return (None,) * (2 + len(operands))
        run = (
            compiled.backward_of(ctx.centered, operands) if torch.compiler.is_compiling() else operations.backward
        )
        return None, None, *run(grad_x, grad_joined, joined, statistics, *operands)
