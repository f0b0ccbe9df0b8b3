"""Compressed convolutional attention (arXiv 2510.04476): attention in a latent space of fewer heads.

Queries and keys are projected down, mixed along time and channels by two short causal convolutions, joined
with the mean of their unmixed forms, and normalised per head. Half of the value channels come from the token
before.
For ZAYA1-base the cache is 8x smaller than that of 16 full heads.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from train.config import ModelConfig
from train.model.precision import at_least_fp32
from train.model.rope import RotaryTable, rotate


class CompressedConvolutionalAttention(nn.Module):
    """Causal grouped-query attention over compressed, convolved queries and keys."""

    def __init__(self, config: ModelConfig, dtype: torch.dtype) -> None:
        super().__init__()
        self.kv_heads = config.kv_heads
        self.head_dim = config.head_dim
        hidden, heads = config.hidden_size, config.query_heads + config.kv_heads
        queries, keys = config.query_heads * config.head_dim, config.kv_heads * config.head_dim
        depthwise, grouped = config.conv_widths
        self.history = depthwise - 1 + grouped - 1

        self.temperature = nn.Parameter(torch.empty(config.kv_heads, dtype=dtype))
        self.query = nn.Linear(hidden, queries, bias=False, dtype=dtype)
        self.key = nn.Linear(hidden, keys, bias=False, dtype=dtype)
        self.value_current = nn.Linear(hidden, keys // 2, bias=False, dtype=dtype)
        self.value_previous = nn.Linear(hidden, keys // 2, bias=False, dtype=dtype)
        channels = queries + keys
        self.depthwise_conv = nn.Conv1d(channels, channels, depthwise, groups=channels, dtype=dtype)
        self.grouped_conv = nn.Conv1d(channels, channels, grouped, groups=heads, dtype=dtype)
        self.output = nn.Linear(queries, hidden, bias=False, dtype=dtype)

    def forward(self, x_BSD: Tensor, rotary: RotaryTable) -> Tensor:
        """Attend causally within each sequence; x is the stage's normed input, the result has its shape."""
        q_BSHP, k_BSJP = self._queries_and_keys(x_BSD)
        v_BSJP = self._values(x_BSD)
        q_BSHP = rotate(q_BSHP, rotary).to(x_BSD.dtype)
        k_BSJP = rotate(k_BSJP, rotary).to(x_BSD.dtype)
        y_BHSP = F.scaled_dot_product_attention(
            q_BSHP.transpose(1, 2),
            k_BSJP.transpose(1, 2),
            v_BSJP.transpose(1, 2),
            is_causal=True,
            scale=1 / math.sqrt(self.head_dim),
            enable_gqa=True,
        )
        return self.output(y_BHSP.transpose(1, 2).flatten(2))

    def _queries_and_keys(self, x_BSD: Tensor) -> tuple[Tensor, Tensor]:
        """Convolve, add the skip, normalise; returned in at least fp32 and not yet rotated."""
        q_BSQ, k_BSQ = self.query(x_BSD), self.key(x_BSD)
        mixed_BSQ = at_least_fp32(self._convolve(torch.cat([q_BSQ, k_BSQ], dim=-1)))
        q_skip_BSHP, k_skip_BSJP = self._mean_skip(at_least_fp32(q_BSQ), at_least_fp32(k_BSQ))

        q_mixed, k_mixed = mixed_BSQ.split([q_BSQ.shape[-1], k_BSQ.shape[-1]], dim=-1)
        q_BSHP = self._unit_rms(q_mixed.unflatten(-1, (-1, self.head_dim)) + q_skip_BSHP)
        k_BSJP = self._unit_rms(k_mixed.unflatten(-1, (-1, self.head_dim)) + k_skip_BSJP)
        return q_BSHP, k_BSJP * self.temperature.unsqueeze(-1)

    def _convolve(self, z_BSQ: Tensor) -> Tensor:
        """Both convolutions over a sequence that zeros precede.

        The zeros are put once, before the first convolution: what the second one sees there is the first
        one's bias, not zero.
        """
        z_BQS = F.pad(z_BSQ.transpose(1, 2), (self.history, 0))
        return self.grouped_conv(self.depthwise_conv(z_BQS)).transpose(1, 2)

    def _mean_skip(self, q_BSQ: Tensor, k_BSQ: Tensor) -> tuple[Tensor, Tensor]:
        """Mean of each query head with its key head, and for the keys the mean of that over their group."""
        q_BSJGP = q_BSQ.unflatten(-1, (self.kv_heads, -1, self.head_dim))
        k_BSJ1P = k_BSQ.unflatten(-1, (self.kv_heads, 1, self.head_dim))
        mean_BSJGP = (q_BSJGP + k_BSJ1P) / 2
        return mean_BSJGP.flatten(2, 3), mean_BSJGP.mean(dim=3)

    def _unit_rms(self, x_BSHP: Tensor) -> Tensor:
        """Scale every head to the length sqrt(head_dim)."""
        eps = torch.finfo(x_BSHP.dtype).eps
        return F.normalize(x_BSHP, dim=-1, eps=eps) * math.sqrt(self.head_dim)

    def _values(self, x_BSD: Tensor) -> Tensor:
        """Current token's channels, then the previous token's (zeros before the first), cut into heads."""
        current_BSQ = self.value_current(x_BSD)
        previous_BSQ = F.pad(self.value_previous(x_BSD)[:, :-1], (0, 0, 1, 0))
        return torch.cat([current_BSQ, previous_BSQ], dim=-1).unflatten(-1, (-1, self.head_dim))
