"""Multiply matrices: by torch (the reference), or by oneDNN on the CPUs where that is faster.

The reference is torch, which serves GPUs, other formats than fp32, small matrices, and CPUs for which it brings
the right kernels itself; `cpu.py` serves the rest. Which one runs depends on the processor, the format, the shapes
and the strides alone, so runs on one machine repeat bit by bit. Between the two, results differ by rounding.

These functions choose by themselves and not through `dispatch.Operation`: they are called for the smallest
products of a model, and the compiler has to see through them.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from zslurm.kernels.matmul import cpu

ROW_MULTIPLE = 32
"""What to round numbers of rows up to where they vary and `kernel_per_shape` holds."""


def matmul(left_MK: Tensor, right_KN: Tensor) -> Tensor:
    """Return left @ right for two matrices of one format and any strides: [M, N] of any strides, no gradient."""
    if cpu.pays(left_MK, right_KN):
        return cpu.matmul(left_MK, right_KN)
    return torch.mm(left_MK, right_KN)


def batched_matmul(left_XMK: Tensor, right_XKN: Tensor, bias_XN: Tensor | None = None) -> Tensor:
    """Return the X products of pairs, as torch.bmm, plus a bias of each: [X, M, N], no gradient."""
    if cpu.pays_for_batch(left_XMK, right_XKN):
        pairs = zip(left_XMK.unbind(), right_XKN.unbind(), strict=True)
        if bias_XN is None:
            return torch.stack([matmul(left_MK, right_KN) for left_MK, right_KN in pairs])
        biases = bias_XN.unbind()
        return torch.stack([cpu.multiply(*pair, bias_N) for pair, bias_N in zip(pairs, biases, strict=True)])
    if bias_XN is None:
        return torch.bmm(left_XMK, right_XKN)
    return torch.baddbmm(bias_XN.unsqueeze(1), left_XMK, right_XKN)


def matmul_into(left_MK: Tensor, right_KN: Tensor, out_MN: Tensor) -> None:
    """Write left @ right into a matrix of at least its format."""
    if left_MK.dtype != out_MN.dtype or cpu.pays(left_MK, right_KN):
        out_MN.copy_(matmul(left_MK, right_KN))
    else:
        torch.mm(left_MK, right_KN, out=out_MN)


def add_matmul(left_MK: Tensor, right_KN: Tensor, total_MN: Tensor) -> None:
    """Add left @ right to a matrix of at least its format."""
    if left_MK.dtype != total_MN.dtype or cpu.pays(left_MK, right_KN):
        total_MN += matmul(left_MK, right_KN)
    else:
        total_MN.addmm_(left_MK, right_KN)


def linear(x: Tensor, weight_OI: Tensor, bias_O: Tensor | None = None) -> Tensor:
    """Return x weight^T + bias over the last dimension, as `torch.nn.functional.linear`; differentiable once."""
    if not cpu.IS_FASTER or x.dim() < 2 or x.device.type != "cpu":
        return F.linear(x, weight_OI, bias_O)
    x_NI = x.flatten(0, -2)
    if not cpu.pays(x_NI, weight_OI.T):
        return F.linear(x, weight_OI, bias_O)
    y_NO: Tensor = _Linear.apply(x_NI, weight_OI, bias_O)  # type: ignore[no-untyped-call]  # torch's
    return y_NO.view(*x.shape[:-1], weight_OI.shape[0])


def kernel_per_shape(x: Tensor) -> bool:
    """Return whether matmuls of this format on this device make a kernel for every shape that they have not met.

    That takes longer than a small matmul. Where the number of rows is another one in every step, as the experts'
    is, multiples of `ROW_MULTIPLE` keep the shapes few.
    """
    return x.device.type == "cpu" and (x.dtype == torch.bfloat16 or (x.dtype == torch.float32 and cpu.IS_FASTER))


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_NI: Tensor, weight_OI: Tensor, bias_O: Tensor | None) -> Tensor:
        ctx.save_for_backward(x_NI, weight_OI)
        return cpu.multiply(x_NI, weight_OI.T, bias_O)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_NO: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        x_NI, weight_OI = ctx.saved_tensors
        wanted = ctx.needs_input_grad
        return (
            matmul(grad_NO, weight_OI) if wanted[0] else None,
            matmul(grad_NO.T, x_NI) if wanted[1] else None,
            grad_NO.sum(dim=0) if wanted[2] else None,
        )
