"""Compute the lower half of symmetric products in column blocks, and mirror it: a quarter of the FLOPs less.

Every block is a product to start, so the shorter side decides what that saves: with one thread a tenth of the time
at 512, a fifth at 768 (`python -m benchmarks optimizer_step`). Matrices are multiplied one by one. In bf16 through
oneDNN the result has the same bits as the reference's; elsewhere they differ by rounding.
"""

from __future__ import annotations

import torch
from torch import Tensor

SMALLEST_SIDE = 512
"""Below it, blocks cost what they save."""

BLOCK = 192  # columns of a block


def symmetric_product(x_KSL: Tensor, out_KSS: Tensor) -> None:
    """Write X X^T of each matrix."""
    for x_SL, out_SS in zip(x_KSL.unbind(), out_KSS.unbind(), strict=True):
        for rows, columns in _column_blocks(len(x_SL)):
            torch.mm(x_SL[rows], x_SL[columns].T, out=out_SS[rows, columns])
        _mirror(out_SS)


def symmetric_polynomial(a_KSS: Tensor, b: float, c: float, out_KSS: Tensor) -> None:
    """Write b A + c A A of each symmetric matrix."""
    for a_SS, out_SS in zip(a_KSS.unbind(), out_KSS.unbind(), strict=True):
        for rows, columns in _column_blocks(len(a_SS)):
            block = a_SS[rows, columns]
            torch.addmm(block, a_SS[rows], a_SS[:, columns], beta=b, alpha=c, out=out_SS[rows, columns])
        _mirror(out_SS)


def _column_blocks(size: int) -> list[tuple[slice, slice]]:
    """Columns of each block of a square's lower half, behind their rows, which begin on the diagonal."""
    starts = range(0, size, BLOCK)
    return [(slice(start, size), slice(start, min(start + BLOCK, size))) for start in starts]


def _mirror(square_SS: Tensor) -> None:
    """Copy what the blocks hold below the diagonal to above it."""
    for _, columns in _column_blocks(len(square_SS)):
        below = square_SS[columns.stop :, columns]
        # Both copies before the last one take torch's quick way of turning a matrix that is whole.
        square_SS[columns, columns.stop :] = below.contiguous().T.contiguous()
