"""What the implementations in torch share: the rotation of a head's first channels, and the formats."""

from __future__ import annotations

import torch
from torch import Tensor


def at_least_fp32(x: Tensor) -> Tensor:
    """Return x in fp32, or unchanged if it is fp64."""
    return x if x.dtype == torch.float64 else x.float()


def rotate(x_SP: Tensor, cos_SA: Tensor, sin_SA: Tensor) -> Tensor:
    """Turn the first 2 A channels of x [..., S, P], in halves, by the angles of their positions."""
    pairs = cos_SA.shape[-1]
    first, second, still = x_SP.split_with_sizes([pairs, pairs, x_SP.shape[-1] - 2 * pairs], dim=-1)
    turned_first = torch.addcmul(first * cos_SA, second, sin_SA, value=-1)
    turned_second = torch.addcmul(second * cos_SA, first, sin_SA)
    return torch.cat([turned_first, turned_second, still], dim=-1)
