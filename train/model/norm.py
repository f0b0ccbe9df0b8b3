"""Root-mean-square normalisation, and the entry of a stage: residual scaling, addition, norm.

An entry asks for the operation `residual_norm`, which is one pass over the residual stream if the device has one.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from zslurm.kernels.residual_norm import residual_norm


class RMSNorm(nn.Module):
    """x / sqrt(mean(x^2) + eps) * weight over the last dimension, in fp32, given in the weight's format."""

    def __init__(self, width: int, eps: float, dtype: torch.dtype) -> None:
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.empty(width, dtype=dtype))

    def forward(self, x: Tensor) -> Tensor:
        """Normalise the last dimension, in at least fp32."""
        weight = self.weight
        if x.dtype == weight.dtype:  # torch computes bf16 in fp32
            return F.rms_norm(x, weight.shape, weight, self.eps)
        wide = torch.promote_types(x.dtype, weight.dtype)
        return F.rms_norm(x.to(wide), weight.shape, weight.to(wide), self.eps).to(weight.dtype)


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
        return residual_norm(
            hidden_BSD,
            self.norm.weight,
            self.norm.eps,
            hidden_affine=(self.hidden_scale, self.hidden_bias),
            residual=residual_BSD,
            residual_affine=None if residual_BSD is None else (self.residual_scale, self.residual_bias),
        )
