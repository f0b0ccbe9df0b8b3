"""Multiply matrices by their own transposes, and form b A + c A A of symmetric ones, with half of the FLOPs.

    symmetric_product(x_KSL, out_KSS)               A = X X^T of K matrices of one shape
    symmetric_polynomial(a_KSS, b, c, out_KSS)      B = b A + c A A; A must be symmetric, which is not checked

X may have any strides, so for X^T X pass the transposed view. The result has the operands' format; sums are fp32
at least. These are two of the three products of a Newton-Schulz step (Keller Jordan,
kellerjordan.github.io/posts/muon). The library's batched product is the reference: it takes no advantage of the
symmetry, and its result is symmetric up to rounding. Triton's tiles on a GPU save half of the FLOPs, and their
result is exactly symmetric.

If no table was measured for a GPU, Triton's tiles are taken if there are at least 1.5 for each compute unit, in
all matrices of the call: with fewer, units idle. On an H100 that is one matrix with a side of 2,560; published
kernels of this kind gain 1.3 to 1.6 times there from 4,096 on and lose up to 2,048 (nil0x9/flash-muon,
pytorch/pytorch#184886). On an MI300X it is one of 3,840, or four of 2,048: of ZAYA1-8B's largest matrices Muon
hands over five.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from zslurm.kernels import checks
from zslurm.kernels.arch import CPU, Arch, arch_of, is_gpu
from zslurm.kernels.dispatch import Operation, Sizes, in_triton

_FORMATS = (torch.bfloat16, torch.float32, torch.float64)
_TILE = 128
_FEWEST_TILES = 1.5
"""For each compute unit."""


def _product_by_library(x_KSL: Tensor, out_KSS: Tensor) -> None:
    """Write X X^T of each matrix, by the library."""
    torch.bmm(x_KSL, x_KSL.mT, out=out_KSS)


def _polynomial_by_library(a_KSS: Tensor, b: float, c: float, out_KSS: Tensor) -> None:
    """Write b A + c A A of each symmetric matrix, by the library."""
    torch.baddbmm(a_KSS, a_KSS, a_KSS, beta=b, alpha=c, out=out_KSS)


def _check_product(x_KSL: Tensor, out_KSS: Tensor) -> None:
    name = "symmetric_product"
    checks.shape(name, "x", x_KSL, (None, None, None), "KSL")
    count, side, _ = x_KSL.shape
    checks.shape(name, "out", out_KSS, (count, side, side), "KSS")
    _check_all(name, x_KSL, out_KSS)


def _check_polynomial(a_KSS: Tensor, b: float, c: float, out_KSS: Tensor) -> None:
    name = "symmetric_polynomial"
    checks.shape(name, "a", a_KSS, (None, None, a_KSS.shape[-1] if a_KSS.dim() else 0), "KSS")
    checks.shape(name, "a", a_KSS, (None, a_KSS.shape[-1], None), "KSS")
    checks.shape(name, "out", out_KSS, tuple(a_KSS.shape), "KSS")
    _check_all(name, a_KSS, out_KSS)


def _check_all(name: str, operand: Tensor, out_KSS: Tensor) -> None:
    checks.dtype_among(name, _FORMATS, operand=operand)
    checks.one_dtype(name, operand=operand, out=out_KSS)
    checks.one_device(name, operand=operand, out=out_KSS)


def _memory_of(name: str) -> Callable[..., None]:
    def check(operand: Tensor, *others: Any) -> None:
        checks.no_overlap(name, "out", others[-1], operand=operand)

    return check


def _sizes(operand: Tensor, *_: object) -> Sizes:
    count, side, length = operand.shape
    rows = -(-side // _TILE)
    tiles = count * rows * (rows + 1) // 2
    return {"dtype": checks.short(operand.dtype), "count": count, "side": side, "length": length, "tiles": tiles}


def _fills_the_gpu(arch: Arch, sizes: Sizes) -> bool:
    """Return whether the tiles keep the compute units of a GPU busy."""
    return arch != CPU and bool(sizes["tiles"] >= _FEWEST_TILES * arch.compute_units)


def _lacks_in_triton(operand: Tensor, *others: object) -> str | None:
    if not is_gpu(operand.device):
        return f"operands on {operand.device.type}"
    if operand.dtype == torch.float64:
        return "float64 operands"
    if operand.dtype == torch.float32 and not arch_of(operand.device).is_amd:
        return "float32 operands on NVIDIA, whose matrix units round them"
    return checks.lacks_near_elements(operand, *(argument for argument in others if isinstance(argument, Tensor)))


symmetric_product = Operation(
    name="symmetric_product.product",
    reference=_product_by_library,
    candidates=[(_fills_the_gpu, in_triton("symmetric_product", "symmetric_product", _lacks_in_triton))],
    check=_check_product,
    check_memory=_memory_of("symmetric_product"),
    device=lambda x_KSL, out_KSS: x_KSL.device,
    sizes=_sizes,
)

symmetric_polynomial = Operation(
    name="symmetric_product.polynomial",
    reference=_polynomial_by_library,
    candidates=[(_fills_the_gpu, in_triton("symmetric_product", "symmetric_polynomial", _lacks_in_triton))],
    check=_check_polynomial,
    check_memory=_memory_of("symmetric_polynomial"),
    device=lambda a_KSS, b, c, out_KSS: a_KSS.device,
    sizes=_sizes,
)


OPERATIONS = (symmetric_product, symmetric_polynomial)
