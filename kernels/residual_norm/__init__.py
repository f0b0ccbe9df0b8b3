"""Join two streams by scale and bias, and normalise their sum: what opens every stage of ZAYA1.

    residual_norm(hidden, weight, eps, ...)     x, t with t = (h + b) a + (r + d) c, x = RMSNorm or LayerNorm of t

Differentiable once. The residual stream and the norm's own bias may be left out. Everything is computed in fp32
(fp64 for fp64); x has the weight's format, t is fp32 at least.

    reference       plain torch in few passes: reference.py has the formulas
    triton          one kernel in each direction, and torch's sum of the partial gradients of scales, biases and
                    weights, without atomics: the same bits every time on one card

Per element of bf16 hidden states and an fp32 stream, the kernels move 12 bytes forward and 18 backward. A row's
squares are added up in fp32: if elements exceed about 1e19 the root is infinite, in every implementation.

Under `torch.compile` the reference is traced, for the compiler to fuse.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from zslurm.kernels import checks
from zslurm.kernels.arch import arch_of, is_gpu
from zslurm.kernels.dispatch import Operation, Sizes, in_triton, on_gpus
from zslurm.kernels.residual_norm import reference
from zslurm.kernels.residual_norm.reference import NormOperands

__all__ = ["OPERATIONS", "residual_norm"]

Affine = tuple[Tensor, Tensor]
"""Scale and bias [D] of a stream: (x + bias) scale."""

_FORMATS = (torch.bfloat16, torch.float32, torch.float64)


def residual_norm(
    hidden: Tensor,
    weight: Tensor,
    eps: float,
    *,
    hidden_affine: Affine,
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
        residual_affine: scale and bias of the residual stream; None without one.
        bias: [D], added behind the weight.
        centered: LayerNorm instead of RMSNorm.

    Raises:
        ValueError: the operands do not fit.
    """
    streams = hidden, *hidden_affine, residual, *(residual_affine or (None, None))
    x, joined = _ResidualNorm.apply(eps, centered, *streams, weight, bias)  # type: ignore[no-untyped-call]
    return x, joined


class _ResidualNorm(torch.autograd.Function):
    """Keeps both streams, t and one number per row, two for LayerNorm; t is its own result."""

    @staticmethod
    def forward(ctx: Any, eps: float, centered: bool, *operands: Tensor | None) -> tuple[Tensor, Tensor]:
        run = reference.forward if torch.compiler.is_compiling() else _forward
        x, joined, statistics = run(eps, centered, *operands)
        ctx.save_for_backward(joined, statistics, *operands)
        return x, joined

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_x: Tensor, grad_joined: Tensor) -> tuple[Tensor | None, ...]:
        run = reference.backward if torch.compiler.is_compiling() else _backward
        return None, None, *run(grad_x, grad_joined, *ctx.saved_tensors)


def _check(eps: float, centered: bool, *tensors: Any) -> None:
    name, operands = "residual_norm", NormOperands(*tensors)
    by_name = {key: operand for key, operand in operands._asdict().items() if operand is not None}
    shape = list(operands.hidden.shape)
    if not eps >= 0:
        raise ValueError(f"{name}: eps is {eps}, but must be at least 0")
    if len(shape) < 2 or not shape[-1]:
        raise ValueError(f"{name}: hidden has the shape {shape}, but must have [..., D] with D of at least 1")
    if len({key in by_name for key in ("residual", "residual_scale", "residual_bias")}) > 1:
        raise ValueError(f"{name}: residual, its scale and its bias are given together, or none of them")
    for key, operand in by_name.items():
        if key == "residual":
            checks.shape(name, key, operand, tuple(shape), "." * len(shape))
        elif key != "hidden":
            checks.shape(name, key, operand, (shape[-1],), "D")
    checks.dtype_among(name, _FORMATS, **by_name)
    checks.one_dtype(name, **{key: operand for key, operand in by_name.items() if operand.dim() == 1})
    if torch.float64 in {operand.dtype for operand in by_name.values()}:
        checks.one_dtype(name, **by_name)  # what is computed in fp64 is in fp64 throughout
    checks.one_device(name, **by_name)


def _sizes(hidden: Tensor) -> Sizes:
    width = hidden.shape[-1]
    return {"dtype": checks.short(hidden.dtype), "rows": hidden.numel() // width, "width": width}


def _lacks_in_triton(hidden: Tensor) -> str | None:
    if not is_gpu(hidden.device):
        return f"operands on {hidden.device.type}"
    if hidden.dtype == torch.float64:
        return "float64 operands"
    # What a workgroup holds in registers, with what backward adds up; 16 warps of AMD have twice NVIDIA's.
    widest = 8192 if arch_of(hidden.device).wave_size == 64 else 4096
    if hidden.shape[-1] > widest:
        return f"rows of more than {widest} elements"
    return "rows of no multiple of 16 elements" if hidden.shape[-1] % 16 else None


def _pass(name: str, check: Callable[..., None], before: int) -> Operation:
    """Return the operation of a pass; `before` is its number of arguments before the operands."""
    return Operation(
        name=f"residual_norm.{name}",
        reference=getattr(reference, name),
        candidates=[(on_gpus, in_triton("residual_norm", name, lambda *args: _lacks_in_triton(args[before])))],
        check=check,
        device=lambda *args: args[before].device,
        sizes=lambda *args: _sizes(args[before]),
    )


_forward = _pass("forward", _check, before=2)
# Its other operands are of the forward pass and of autograd, in the formats and shapes that they must have.
_backward = _pass("backward", lambda *args: _check(0.0, False, *args[4:]), before=4)

OPERATIONS = (_forward, _backward)
