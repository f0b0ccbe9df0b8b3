"""Root-mean-square normalisation, and the entry of a stage: residual scaling, addition, norm.

An entry is one pass over the residual stream, and is kept as one module so that one fused kernel can do it.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from train.model.precision import at_least_fp32


class RMSNorm(nn.Module):
    """x / sqrt(mean(x^2) + eps) * weight over the last dimension, in fp32, given in the weight's format."""

    def __init__(self, width: int, eps: float, dtype: torch.dtype) -> None:
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.empty(width, dtype=dtype))

    def forward(self, x: Tensor) -> Tensor:
        x = at_least_fp32(x)
        y = F.rms_norm(x, self.weight.shape, self.weight.to(x.dtype), self.eps)
        return y.to(self.weight.dtype)


class StageEntry(nn.Module):
    """Adds what the stage before wrote to the residual stream, and normalises the sum for this stage.

        residual <- (hidden + hidden_bias) * hidden_scale + (residual + residual_bias) * residual_scale
        x        <- RMSNorm(residual)

    The first entry of the model has no residual stream yet and starts it.
    """

    def __init__(self, width: int, eps: float, dtype: torch.dtype, *, first: bool = False) -> None:
        super().__init__()
        self.hidden_scale = nn.Parameter(torch.empty(width, dtype=dtype))
        self.hidden_bias = nn.Parameter(torch.empty(width, dtype=dtype))
        if not first:
            self.residual_scale = nn.Parameter(torch.empty(width, dtype=dtype))
            self.residual_bias = nn.Parameter(torch.empty(width, dtype=dtype))
        self.norm = RMSNorm(width, eps, dtype)

    def forward(self, hidden_BSD: Tensor, residual_BSD: Tensor | None) -> tuple[Tensor, Tensor]:
        """Return the stage's input in the parameters' format, and the residual stream in at least fp32."""
        joined_BSD = (at_least_fp32(hidden_BSD) + self.hidden_bias) * self.hidden_scale
        if residual_BSD is not None:
            joined_BSD = joined_BSD + (residual_BSD + self.residual_bias) * self.residual_scale
        return self.norm(joined_BSD), joined_BSD
