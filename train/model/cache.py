"""What decoding keeps of the tokens before: per layer, rotated keys and values, and two short memories.

    keys, values      of every token, [B, J, S, P]: all that grows with the sequence
    before            projected queries and keys of the last w1 + w2 - 2 tokens, for the convolutions
    delayed           the last token's projection that becomes half of the next token's values

The router's state runs from layer to layer within one token and needs nothing. For ZAYA1-base in bf16 keys and
values are 40,960 bytes per token, against 327,680 with 16 full heads.

A cache also holds each layer's attention weights as decoding wants them (four projections as one, two
convolutions as one), so it belongs to the weights that it was made with.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from zslurm.kernels.qk_conv import JoinedKernel
from zslurm.train.config import ModelConfig
from zslurm.train.model.rope import RotaryTable, rotary_table


def bytes_per_token(config: ModelConfig, dtype: torch.dtype) -> int:
    """Return the bytes by which the cache of one sequence grows with every token."""
    return 2 * config.layers * config.kv_heads * config.head_dim * dtype.itemsize


@dataclass
class LayerCache:
    """One layer's share; `attention.py` reads and writes it. Keys and values have room for more than they hold."""

    keys_BJSP: Tensor
    values_BJSP: Tensor
    before_BWQ: Tensor
    delayed_B1Q: Tensor
    projection_QD: Tensor
    kernel: JoinedKernel

    def append(self, k_BJSP: Tensor, v_BJSP: Tensor, start: int) -> tuple[Tensor, Tensor]:
        """Add tokens at position `start` and give back keys and values of all tokens so far."""
        end = start + k_BJSP.shape[2]
        self.keys_BJSP[:, :, start:end] = k_BJSP
        self.values_BJSP[:, :, start:end] = v_BJSP
        return self.keys_BJSP[:, :, :end], self.values_BJSP[:, :, :end]

    def grow(self, room: int) -> None:
        """Make room for `room` tokens in all."""
        for name in ("keys_BJSP", "values_BJSP"):
            old: Tensor = getattr(self, name)
            new = old.new_zeros(*old.shape[:2], room, old.shape[3])
            new[:, :, : old.shape[2]] = old
            setattr(self, name, new)


Step = Callable[[Tensor, RotaryTable, int], Tensor]
"""Computes the normed hidden states [B, D] of the token at a position of each sequence from their embeddings."""


class Cache:
    """The cache of sequences of equal length that are decoded together.

    Attributes:
        layers: one part for each layer.
        length: tokens of each sequence that it holds.
        step: a faster way for a single token, where there is one; see `decode_step.py`.
    """

    def __init__(self, config: ModelConfig, layers: list[LayerCache]) -> None:
        """Make it with `Zaya.new_cache`."""
        self.layers = layers
        self.length = 0
        self._config = config
        self._rotary: tuple[float, RotaryTable] | None = None
        self.step: Step | None = None

    @property
    def room(self) -> int:
        """Return the tokens for which memory is allocated."""
        return self.layers[0].keys_BJSP.shape[2]

    def reserve(self, tokens: int) -> None:
        """Make room for `tokens` more; memory is doubled when it is full."""
        needed = self.length + tokens
        if needed > self.room:
            room = max(needed, 2 * self.room)
            for layer in self.layers:
                layer.grow(room)

    def angles(self, base: float, dtype: torch.dtype) -> RotaryTable:
        """Angles of all positions there is room for; the same object until there is more room."""
        if self._rotary is None or self._rotary[0] != base or len(self._rotary[1].cos_SA) < self.room:
            positions_S = torch.arange(self.room, device=self.layers[0].keys_BJSP.device)
            self._rotary = base, rotary_table(positions_S, self._config.rotary_dim, base, dtype)
        return self._rotary[1]
