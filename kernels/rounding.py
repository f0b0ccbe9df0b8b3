"""Round as IEEE 754 has it if torch does not: what references need that kernels repeat bit by bit."""

from __future__ import annotations

import torch
from torch import Tensor


def root(x: Tensor) -> Tensor:
    """Return the square root, rounded correctly for fp32.

    With MKL, torch's own is off by one unit for every fifth fp32 number. The root in fp64 has more than twice the
    digits, so that rounding it again changes nothing.
    """
    return x.double().sqrt().to(x.dtype) if x.dtype == torch.float32 else x.sqrt()
