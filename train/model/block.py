"""One layer: an attention stage, then an expert stage, each opened by an entry to the residual stream."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor, nn

from zslurm.train.config import ModelConfig
from zslurm.train.model.attention import CompressedConvolutionalAttention
from zslurm.train.model.cache import LayerCache
from zslurm.train.model.experts import Experts
from zslurm.train.model.norm import StageEntry
from zslurm.train.model.packing import Packing
from zslurm.train.model.router import make_router


class Stream(NamedTuple):
    """What one layer hands to the next."""

    hidden_BSD: Tensor  # output of the last stage, not yet added to the residual stream
    residual_BSD: Tensor | None  # the residual stream in at least fp32; None before the first stage
    router_TR: Tensor | None  # state of the last router; None before the first, and where routers are linear


class Layer(nn.Module):
    """Attention stage and expert stage."""

    def __init__(self, config: ModelConfig, dtype: torch.dtype, *, first: bool) -> None:
        super().__init__()
        self.attention_entry = StageEntry(config.hidden_size, config.norm_eps, dtype, first=first)
        self.attention = CompressedConvolutionalAttention(config, dtype)
        self.expert_entry = StageEntry(config.hidden_size, config.norm_eps, dtype)
        self.router = make_router(config, dtype, first=first)
        self.experts = Experts(config, dtype)

    def forward(
        self, stream: Stream, packing: Packing, balancing_bias_C: Tensor, cache: LayerCache | None = None
    ) -> tuple[Stream, Tensor]:
        """Return the stream after this layer, and each router class's number of choices [C], int64."""
        x_BSD, residual_BSD = self.attention_entry(stream.hidden_BSD, stream.residual_BSD)
        hidden_BSD = self.attention(x_BSD, packing, cache)

        x_BSD, residual_BSD = self.expert_entry(hidden_BSD, residual_BSD)
        x_TD = x_BSD.flatten(0, 1)
        routing = self.router(x_TD, stream.router_TR, balancing_bias_C)
        valid_T = None if packing.valid_BS1 is None else packing.valid_BS1.expand(*x_BSD.shape[:2], 1).flatten()
        y_TD, counts_C = self.experts(x_TD, routing, valid_T)
        return Stream(y_TD.view_as(x_BSD), residual_BSD, routing.state_TR), counts_C
