"""Cases of the symmetric products: what they are checked and measured on."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import torch

from zslurm.kernels.case import TOLERANCE, Call, Case, drawn

_MATRICES = tuple(
    (count, side) for side in (512, 1024, 2048, 3072, 4096, 8192) for count in (1, 5) if side * count < 20480
)
_SMALL_MATRICES = ((1, 128), (2, 640))
"""How many, and their shorter side; of matrices of 2,048 x 4,096 Muon hands over five at once."""


def checks() -> Iterator[Case]:
    """Yield odd and even sizes, wide and tall."""
    for dtype in (torch.bfloat16, torch.float32):
        for count, side, length in ((2, 64, 128), (3, 65, 31), (1, 130, 77)):
            yield from _both(dtype, count, side, length)


def benchmarks(small: bool) -> Iterator[Case]:
    """Yield one matrix and five of each side, twice as long, by how many tiles they have."""
    matrices = _SMALL_MATRICES if small else _MATRICES
    for count, side in sorted(matrices, key=lambda size: size[0] * size[1] ** 2):
        yield from _both(torch.bfloat16, count, side, 2 * side)


def _both(dtype: torch.dtype, count: int, side: int, length: int) -> Iterator[Case]:
    name = f"{str(dtype).removeprefix('torch.')} {count} x {side} x"
    size, itemsize = count * side, dtype.itemsize
    yield Case(
        "symmetric_product.product",
        f"{name} {length}",
        partial(_product, dtype, count, side, length),
        TOLERANCE[dtype],
        flops=2.0 * size * side * length,
        bytes=float(itemsize * size * (length + side)),
        axis="tiles",
    )
    yield Case(
        "symmetric_product.polynomial",
        f"{name} {side}",
        partial(_polynomial, dtype, count, side),
        TOLERANCE[dtype],
        flops=2.0 * size * side * side,
        bytes=float(itemsize * size * 2 * side),
        axis="tiles",
    )


def _product(dtype: torch.dtype, count: int, side: int, length: int, device: torch.device) -> Call:
    x_KSL = drawn(device, dtype, count, side, length)
    out_KSS = x_KSL.new_full((count, side, side), torch.nan)
    return Call(lambda: (x_KSL, out_KSS), lambda _: [out_KSS])


def _polynomial(dtype: torch.dtype, count: int, side: int, device: torch.device) -> Call:
    a_KSS = drawn(device, dtype, count, side, side)
    a_KSS = (a_KSS.tril() + a_KSS.tril(-1).mT).div_(side**0.5)
    out_KSS = torch.full_like(a_KSS, torch.nan)
    return Call(lambda: (a_KSS, -4.775, 2.0315, out_KSS), lambda _: [out_KSS])
