"""Rotary position embedding (arXiv 2104.09864) of the first channels of each head, in halves.

Channel a of the first half is paired with channel a of the second half, and the pair is turned by
position * base^(-2a/A), A being the number of channels that rotate. The other channels pass unchanged.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


class RotaryTable(NamedTuple):
    """Cosines and sines of every position's angles, one column per pair of channels.

    Both are [S, A], or [B, S, A] if sequences of a batch count their positions differently.
    """

    cos_SA: Tensor
    sin_SA: Tensor


def rotary_table(positions_S: Tensor, rotary_dim: int, base: float, dtype: torch.dtype) -> RotaryTable:
    """Angles of the given positions, [S] or [B, S]; rotary_dim channels make rotary_dim / 2 pairs.

    The table is a few hundred KiB and serves all layers of a forward pass. dtype is fp32, or fp64 in tests.
    """
    exponents_A = torch.arange(0, rotary_dim, 2, device=positions_S.device, dtype=dtype) / rotary_dim
    angles_SA = positions_S.to(dtype).unsqueeze(-1) * base**-exponents_A
    return RotaryTable(angles_SA.cos(), angles_SA.sin())
