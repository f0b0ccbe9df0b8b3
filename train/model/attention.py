"""Compressed convolutional attention (arXiv 2510.04476): attention in a latent space of fewer heads.

Queries and keys are projected down, mixed along time and channels by two short causal convolutions, joined
with the mean of their unmixed forms, and normalised per head (`kernels/qk_conv`). Half of the value channels come
from the token before.
For ZAYA1-base the cache is 8x smaller than that of 16 full heads.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from zslurm.kernels.qk_conv import Convolutions, join, qk_conv
from zslurm.train.config import ModelConfig
from zslurm.train.context.attention import attend_in_context
from zslurm.train.context.context_parallel import ContextParallel
from zslurm.train.context.halos import (
    exchange_halos,
    last_tokens,
    previous_tokens,
    put_before,
    without_halos,
)
from zslurm.train.model.attention_backends.packages import FlashAttention, Kernels
from zslurm.train.model.attention_backends.sdpa import attend, attend_by_sdpa
from zslurm.train.model.cache import LayerCache
from zslurm.train.model.packing import Packing


class CompressedConvolutionalAttention(nn.Module):
    """Causal grouped-query attention over compressed, convolved queries and keys."""

    def __init__(self, config: ModelConfig, dtype: torch.dtype) -> None:
        super().__init__()
        self.head_dim = config.head_dim
        self.kernels: Kernels = "auto"
        self._exchange_halos, self._attend_together = exchange_halos, attend_in_context
        hidden, heads = config.hidden_size, config.query_heads + config.kv_heads
        queries, keys = config.query_heads * config.head_dim, config.kv_heads * config.head_dim
        depthwise, grouped = config.conv_widths

        self.temperature = nn.Parameter(torch.empty(config.kv_heads, dtype=dtype))
        self.query = nn.Linear(hidden, queries, bias=False, dtype=dtype)
        self.key = nn.Linear(hidden, keys, bias=False, dtype=dtype)
        self.value_current = nn.Linear(hidden, keys // 2, bias=False, dtype=dtype)
        self.value_previous = nn.Linear(hidden, keys // 2, bias=False, dtype=dtype)
        channels = queries + keys
        self.depthwise_conv = nn.Conv1d(channels, channels, depthwise, groups=channels, dtype=dtype)
        self.grouped_conv = nn.Conv1d(channels, channels, grouped, groups=heads, dtype=dtype)
        self.output = nn.Linear(queries, hidden, bias=False, dtype=dtype)

    def forward(self, x_BSD: Tensor, packing: Packing, cache: LayerCache | None = None) -> Tensor:
        """Attend causally within each sequence; x is the stage's normed input, the result has its shape.

        Without a cache, x are whole sequences, or this rank's chunks of sequences that it shares with others. With
        one, x are the next tokens of the sequences that the cache holds, and their share is added to it.
        """
        if packing.valid_BS1 is not None:
            x_BSD = x_BSD * packing.valid_BS1
        z_BSQ, current_BSQ, delayed_BSQ = self.project(x_BSD, cache)
        q_BHSP, k_BJSP, previous_BSQ = self.mix(z_BSQ, delayed_BSQ, packing, cache)
        v_BJSP = self.values(current_BSQ, previous_BSQ)
        if cache is not None:
            cache.keep(k_BJSP, v_BJSP, packing.slots)
        y_BSX = self._attend(q_BHSP, k_BJSP, v_BJSP, packing, cache)
        return F.linear(y_BSX, self.output.weight)

    def mix(
        self, z_BSQ: Tensor, delayed_BSQ: Tensor, packing: Packing, cache: LayerCache | None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return queries and keys [B, H or J, S, P], and what the token before each leaves for its values."""
        if packing.context is not None:
            return self._mix_chunks(z_BSQ, delayed_BSQ, packing, packing.context, cache)
        if cache is not None:
            q_BHSP, k_BJSP = cache.convolve(z_BSQ, self.temperature, packing.rotary)
            return q_BHSP, k_BJSP, cache.shift(delayed_BSQ)
        q_BHSP, k_BJSP = qk_conv(z_BSQ, self.convolutions(), self.temperature, *packing.rotary, packing.linked)
        previous_BSQ = F.pad(delayed_BSQ[:, :-1], (0, 0, 1, 0))
        if packing.linked is not None:
            previous_BSQ = previous_BSQ * packing.linked[0]
        return q_BHSP, k_BJSP, previous_BSQ

    def _mix_chunks(
        self,
        z_BSQ: Tensor,
        delayed_BSQ: Tensor,
        packing: Packing,
        context: ContextParallel,
        cache: LayerCache | None,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Mix this rank's two chunks of sequences with the tokens before each, which other ranks have."""
        convolutions = self.convolutions()
        before_B2WQ, before_B21Q = self._exchange_halos(context, z_BSQ, delayed_BSQ, convolutions.reach)
        # The tokens before each chunk go through the convolutions as well, and what becomes of them is dropped.
        q_BHSP, k_BJSP = (
            without_halos(x, convolutions.reach, dim=2)
            for x in qk_conv(
                put_before(before_B2WQ, z_BSQ), convolutions, self.temperature, *packing.rotary, packing.linked
            )
        )
        previous_BSQ = previous_tokens(before_B21Q, delayed_BSQ)
        if packing.linked is not None:
            previous_BSQ = previous_BSQ * without_halos(packing.linked[0], convolutions.reach, dim=1)
        if cache is not None:
            assert packing.slots is not None
            cache.before_BWQ = last_tokens(context, z_BSQ, packing.slots.length, convolutions.reach)
            cache.delayed_B1Q = last_tokens(context, delayed_BSQ, packing.slots.length, 1)
        return q_BHSP, k_BJSP, previous_BSQ

    def _attend(
        self, q_BHSP: Tensor, k_BJSP: Tensor, v_BJSP: Tensor, packing: Packing, cache: LayerCache | None
    ) -> Tensor:
        """Return the attention of queries to keys and values, and to those in a cache, [B, S, H P]."""
        if packing.context is not None:
            return self._attend_together(packing.context, q_BHSP, k_BJSP, v_BJSP, packing.labels)
        if cache is not None:
            return cache.attend(q_BHSP, packing.slots).transpose(1, 2).flatten(2)
        mask_B1SS = packing.attend_B1SS
        if isinstance(self.kernels, FlashAttention) and mask_B1SS is None:
            return self.kernels(q_BHSP, k_BJSP, v_BJSP, packing.bounds_N)
        by_torch = attend if self.kernels == "auto" else attend_by_sdpa
        return by_torch(q_BHSP, k_BJSP, v_BJSP, mask_B1SS)

    def communicate_outside_of_graphs(self) -> None:
        """End torch.compile's graphs at what ranks that share sequences exchange."""
        self._exchange_halos = torch.compiler.disable(exchange_halos)
        self._attend_together = torch.compiler.disable(attend_in_context)

    def new_cache(self, batch: int, room: int) -> LayerCache:
        """Return an empty cache with room for `room` tokens of each sequence."""
        projection_QD = self.projection()
        half = self.value_current.out_features
        channels = len(projection_QD) - 2 * half
        reach = self.depthwise_conv.kernel_size[0] + self.grouped_conv.kernel_size[0] - 2
        empty_BJSP = projection_QD.new_zeros(batch, self.temperature.shape[0], room, self.head_dim)
        return LayerCache(
            keys_BJSP=empty_BJSP,
            values_BJSP=empty_BJSP.clone(),
            before_BWQ=projection_QD.new_zeros(batch, reach, channels),
            delayed_B1Q=projection_QD.new_zeros(batch, 1, half),
            projection_QD=projection_QD,
            kernel=join(self.convolutions()),
        )

    def project(self, x_BSD: Tensor, cache: LayerCache | None = None) -> tuple[Tensor, Tensor, Tensor]:
        """Return queries with keys, this token's values, and the next token's: one product."""
        weight_QD = self.projection() if cache is None else cache.projection_QD
        half = self.value_current.out_features
        z_BSQ, current_BSQ, delayed_BSQ = F.linear(x_BSD, weight_QD).split(
            [len(weight_QD) - 2 * half, half, half], dim=-1
        )
        return z_BSQ, current_BSQ, delayed_BSQ

    def projection(self) -> Tensor:
        """Return the four projections as one matrix."""
        parts = (self.query, self.key, self.value_current, self.value_previous)
        return torch.cat([part.weight for part in parts])

    def convolutions(self) -> Convolutions:
        """Return both convolutions of queries and keys."""
        depthwise, grouped = self.depthwise_conv, self.grouped_conv
        assert depthwise.bias is not None and grouped.bias is not None
        return Convolutions(depthwise.weight, depthwise.bias, grouped.weight, grouped.bias)

    def values(self, current_BSQ: Tensor, previous_BSQ: Tensor) -> Tensor:
        """Return the values [B, J, S, P] of tokens: their own channels, then those that tokens before leave."""
        values_BSQ = torch.cat([current_BSQ, previous_BSQ], dim=-1)
        return values_BSQ.unflatten(-1, (-1, self.head_dim)).transpose(1, 2)
