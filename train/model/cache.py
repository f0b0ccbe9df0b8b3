"""What decoding keeps of the tokens before: per layer, rotated keys and values, and two short memories.

    keys, values      of every token, [B, J, S, P]: all that grows with the sequence
    before            projected queries and keys of the last w1 + w2 - 2 tokens, for the convolutions
    delayed           the last token's projection that becomes half of the next token's values

The router's state runs from layer to layer within one token and needs nothing. For ZAYA1-base in bf16 keys and
values are 40,960 bytes per token, against 327,680 with 16 full heads.

With the cache divided over ranks (`train/context/tree_attention.py`), each rank has the keys and values of some
tokens only; the short memories are on all ranks, for every rank computes every next token.

A cache also holds each layer's attention weights as decoding wants them (four projections as one, two
convolutions as one), so it belongs to the weights that it was made with.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from zslurm.kernels.qk_conv import JoinedKernel, qk_conv
from zslurm.train.config import ModelConfig
from zslurm.train.context.context_parallel import ContextParallel
from zslurm.train.context.tree_attention import DividedCache
from zslurm.train.model.rope import RotaryTable, rotary_table


def bytes_per_token(config: ModelConfig, dtype: torch.dtype) -> int:
    """Return the bytes by which the cache of one sequence grows with every token."""
    return 2 * config.layers * config.kv_heads * config.head_dim * dtype.itemsize


class Slots(NamedTuple):
    """Where the next tokens' keys and values go, and which of those in the cache each next token sees.

    Attributes:
        length: tokens of each sequence with them.
        start: keys that the cache holds without them.
        stop: keys that it holds with them.
        kept_N: which of the next tokens are kept here, int64; None: all.
        seen_ST: which next token sees which key; None: each all of them.
        divided: the ranks over which the cache is divided.
    """

    length: int
    start: int
    stop: int
    kept_N: Tensor | None = None
    seen_ST: Tensor | None = None
    divided: DividedCache | None = None


@dataclass
class LayerCache:
    """One layer's share; `attention.py` reads and writes it. Keys and values have room for more than they hold.

    Attributes:
        keys_BJSP: rotated keys.
        values_BJSP: values.
        before_BWQ: projections of the last tokens of each sequence, for the convolutions.
        delayed_B1Q: what the last token of each sequence leaves for the values of the next.
        projection_QD: the four projections as one matrix.
        kernel: both convolutions as one.
    """

    keys_BJSP: Tensor
    values_BJSP: Tensor
    before_BWQ: Tensor
    delayed_B1Q: Tensor
    projection_QD: Tensor
    kernel: JoinedKernel

    def convolve(self, z_BSQ: Tensor, temperature_J: Tensor, rotary: RotaryTable) -> tuple[Tensor, Tensor]:
        """Return queries and keys of the next tokens from their projections, which are kept for those after."""
        q_BHSP, k_BJSP = qk_conv(z_BSQ, self.kernel, temperature_J, *rotary, before_BWQ=self.before_BWQ)
        if reach := self.before_BWQ.shape[1]:
            self.before_BWQ = torch.cat([self.before_BWQ, z_BSQ], dim=1)[:, -reach:]
        return q_BHSP, k_BJSP

    def shift(self, delayed_BSQ: Tensor) -> Tensor:
        """Return the token before's share of each next token's values; keep the last one's own."""
        previous_BSQ = torch.cat([self.delayed_B1Q, delayed_BSQ[:, :-1]], dim=1)
        self.delayed_B1Q = delayed_BSQ[:, -1:]
        return previous_BSQ

    def attend(self, q_BHSP: Tensor, slots: Slots | None) -> Tensor:
        """Return the attention of the next tokens, whose keys and values are kept already, to all so far."""
        assert slots is not None
        keys_BJTP, values_BJTP = self.keys_BJSP[:, :, : slots.stop], self.values_BJSP[:, :, : slots.stop]
        if slots.divided is not None:
            return slots.divided.attend(q_BHSP, keys_BJTP, values_BJTP, slots.seen_ST)
        if q_BHSP.shape[2] == 1:
            # Query heads of one key head are like positions that all see the same keys.
            q_BJGP = q_BHSP.flatten(1, 2).unflatten(1, (keys_BJTP.shape[1], -1))
            return F.scaled_dot_product_attention(q_BJGP, keys_BJTP, values_BJTP).view(q_BHSP.shape)
        return F.scaled_dot_product_attention(
            q_BHSP, keys_BJTP, values_BJTP, slots.seen_ST, is_causal=slots.seen_ST is None, enable_gqa=True
        )

    def keep(self, k_BJSP: Tensor, v_BJSP: Tensor, slots: Slots | None) -> None:
        """Add the next tokens' keys and values, those that are kept here."""
        assert slots is not None
        if slots.kept_N is not None:
            k_BJSP, v_BJSP = k_BJSP[:, :, slots.kept_N], v_BJSP[:, :, slots.kept_N]
        self.keys_BJSP[:, :, slots.start : slots.stop] = k_BJSP
        self.values_BJSP[:, :, slots.start : slots.stop] = v_BJSP

    def grow(self, room: int) -> None:
        """Make room for `room` tokens in all."""
        for name in ("keys_BJSP", "values_BJSP"):
            old: Tensor = getattr(self, name)
            new = old.new_zeros(*old.shape[:2], room, old.shape[3])
            new[:, :, : old.shape[2]] = old
            setattr(self, name, new)


class Cache:
    """The cache of sequences of equal length that are decoded together.

    Attributes:
        layers: one part for each layer.
        length: tokens of each sequence so far.
        held: those whose keys and values are here; fewer if ranks divide them.
    """

    def __init__(self, config: ModelConfig, layers: list[LayerCache], divided: DividedCache | None = None) -> None:
        """Make it with `Zaya.new_cache`."""
        self.layers = layers
        self.length = self.held = 0
        self._divided = divided
        self._device = layers[0].keys_BJSP.device
        self._position_T = torch.arange(0)  # of what is held here, on the host
        self._config = config
        self._rotary: tuple[float, RotaryTable] | None = None

    @property
    def room(self) -> int:
        """Return the tokens for which memory is allocated."""
        return self.layers[0].keys_BJSP.shape[2]

    def reserve(self, tokens: int) -> Slots:
        """Make room for `tokens` more of each sequence, of which those that are kept here count as held.

        Memory is doubled when it is full.
        """
        start, position_S = self.held, torch.arange(self.length, self.length + tokens)
        kept_N = None
        if self._divided is not None:
            kept_N = self._divided.keeps(position_S).nonzero().squeeze(1)
        self._hold(tokens, position_S if kept_N is None else position_S[kept_N])
        seen_ST = None
        if tokens > 1 and (start > 0 or self._divided is not None):
            seen_ST = (position_S.unsqueeze(1) >= self._position_T).to(self._device)
        return Slots(self.length, start, self.held, kept_N, seen_ST, self._divided)

    def fill(self, tokens: int, context: ContextParallel) -> Slots:
        """Make room for sequences of so many tokens that the ranks of `context` share, each with its chunks."""
        position_S = context.positions(tokens)
        kept_N = (position_S < tokens).nonzero().squeeze(1)  # the rest is padding
        self._hold(tokens, position_S[kept_N])
        return Slots(self.length, 0, self.held, kept_N, divided=self._divided)

    def _hold(self, tokens: int, position_N: Tensor) -> None:
        """Count `tokens` more of each sequence, those at these positions as held here."""
        self.length += tokens
        self._position_T = torch.cat([self._position_T, position_N])
        self.held = len(self._position_T)
        if self.held > self.room:
            room = max(self.held, 2 * self.room)
            for layer in self.layers:
                layer.grow(room)

    def angles(self, base: float, dtype: torch.dtype) -> RotaryTable:
        """Angles of all positions so far and of some more; the same object until there are too few."""
        if self._rotary is None or self._rotary[0] != base or len(self._rotary[1].cos_SA) < self.length:
            positions_S = torch.arange(max(self.room, 2 * self.length), device=self._device)
            self._rotary = base, rotary_table(positions_S, self._config.rotary_dim, base, dtype)
        return self._rotary[1]
