"""Define the head's product: the operands in at least fp32, multiplied."""

from __future__ import annotations

import torch
from torch import Tensor


def product(left_MK: Tensor, right_KN: Tensor, out_MN: Tensor) -> None:
    """Write left right."""
    torch.mm(left_MK.to(out_MN.dtype), right_KN.to(out_MN.dtype), out=out_MN)
