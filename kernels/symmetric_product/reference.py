"""Multiply a matrix by its own transpose, and form the polynomial of a symmetric matrix, as the definition has it.

    symmetric_product       A = X X^T
    symmetric_polynomial    B = b A + c A A, for a symmetric A

These are two of the three products of a Newton-Schulz step (Keller Jordan, kellerjordan.github.io/posts/muon).
torch's batched products take no advantage of the symmetry, and theirs is exact only up to rounding.
"""

from __future__ import annotations

import torch
from torch import Tensor


def symmetric_product(x_KSL: Tensor, out_KSS: Tensor) -> None:
    """Write X X^T of each matrix, by the library."""
    torch.bmm(x_KSL, x_KSL.mT, out=out_KSS)


def symmetric_polynomial(a_KSS: Tensor, b: float, c: float, out_KSS: Tensor) -> None:
    """Write b A + c A A of each symmetric matrix, by the library."""
    torch.baddbmm(a_KSS, a_KSS, a_KSS, beta=b, alpha=c, out=out_KSS)
