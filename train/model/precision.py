"""The fp32 islands: computed in fp32 if bf16 would cost accuracy, in fp64 if the input is fp64."""

from __future__ import annotations

import torch
from torch import Tensor


def at_least_fp32(x: Tensor) -> Tensor:
    """Return x in fp32, or unchanged if it is fp64."""
    return x if x.dtype == torch.float64 else x.float()
