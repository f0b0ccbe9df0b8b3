"""Define the head's product: the operands in at least fp32, multiplied."""

from __future__ import annotations

from torch import Tensor

from zslurm.kernels.matmul import matmul_into


def product(left_MK: Tensor, right_KN: Tensor, out_MN: Tensor) -> None:
    """Write left right."""
    matmul_into(left_MK.to(out_MN.dtype), right_KN.to(out_MN.dtype), out_MN)
