"""One more token of each sequence, with as few operations as it takes: decoding on a CPU.

A single token's arithmetic is small, so a forward pass spends its time on starting operations: about 250 per
layer the usual way, some 45 here. What can be worked out beforehand is (both affine maps of an entry as one
constant, the mean skip as a matrix over heads), no gradient is provided for, and the expert is looked up by its
number. The same cache is read and written as by `Zaya.decode` with many tokens, and the results are the same.

On other devices the expert's number would have to be waited for in every layer: they take the usual way.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from zslurm.train.config import ModelConfig
from zslurm.train.model.block import Layer
from zslurm.train.model.cache import NextTokens, Slots
from zslurm.train.model.norm import StageEntry
from zslurm.train.model.precision import at_least_fp32
from zslurm.train.model.rope import RotaryTable
from zslurm.train.model.router import Router

Positions = int | Tensor
"""Where the token is: one position for all sequences, or each sequence's, int64 [B, 1] for the heads' sake."""


class StepRotary:
    """Rotation of one position as y = x * cos + x[swapped] * sin, over all channels of a head."""

    def __init__(self, table: RotaryTable, head_dim: int) -> None:
        """Widen the angles of positions [S, A] to [S, P]."""
        cos_SA, sin_SA = table
        pairs = cos_SA.shape[-1]
        still = cos_SA.new_zeros(cos_SA.shape[0], head_dim - 2 * pairs)
        self.cos_SP = torch.cat([cos_SA, cos_SA, still + 1], dim=-1)
        self.sin_SP = torch.cat([-sin_SA, sin_SA, still], dim=-1)
        channel_P = torch.arange(head_dim)
        swapped_P = torch.where(channel_P < pairs, channel_P + pairs, channel_P - pairs)
        self.swapped_P = torch.where(channel_P < 2 * pairs, swapped_P, channel_P)


class _Entry:
    """`StageEntry` with its biases multiplied out: residual <- hidden * a + residual * b + c."""

    def __init__(self, entry: StageEntry) -> None:
        self.hidden_scale = at_least_fp32(entry.hidden_scale)
        self.constant = at_least_fp32(entry.hidden_bias) * self.hidden_scale
        self.residual_scale: Tensor | None = None
        if hasattr(entry, "residual_scale"):
            self.residual_scale = at_least_fp32(entry.residual_scale)
            self.constant = self.constant + at_least_fp32(entry.residual_bias) * self.residual_scale
        self.norm = at_least_fp32(entry.norm.weight)
        self.eps = entry.norm.eps
        self.dtype = entry.norm.weight.dtype

    def __call__(self, hidden_BD: Tensor, residual_BD: Tensor | None) -> tuple[Tensor, Tensor]:
        joined_BD = torch.addcmul(self.constant, at_least_fp32(hidden_BD), self.hidden_scale)
        if residual_BD is not None and self.residual_scale is not None:
            joined_BD.addcmul_(residual_BD, self.residual_scale)
        return F.rms_norm(joined_BD, self.norm.shape, self.norm, self.eps).to(self.dtype), joined_BD


class LayerStep:
    """One layer for one token of each sequence."""

    def __init__(self, layer: Layer, config: ModelConfig, cache: NextTokens) -> None:
        self.config = config
        self.cache = cache
        self.attention_entry, self.expert_entry = _Entry(layer.attention_entry), _Entry(layer.expert_entry)
        queries, keys = config.query_heads, config.kv_heads
        wide = self.attention_entry.norm.dtype
        self.kernel_hIP, self.bias_hP = cache.kernel
        self.skip_hh = _mean_skip_matrix(queries, keys, wide)
        scale_h = torch.full((queries + keys,), math.sqrt(config.head_dim), dtype=wide)
        scale_h[queries:] *= at_least_fp32(layer.attention.temperature)
        self.scale_h1 = scale_h.unsqueeze(-1)
        self.smallest = torch.finfo(wide).eps
        self.output_DQ = layer.attention.output.weight
        self.router = layer.router
        self.gate_up_E = layer.experts.gate_up.weight.unbind()
        self.down_E = layer.experts.down.weight.unbind()

    def __call__(
        self,
        hidden_BD: Tensor,
        residual_BD: Tensor | None,
        router_BR: Tensor | None,
        balancing_bias_C: Tensor,
        rotary: StepRotary,
        position: Positions,
        slots: Slots | None,
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        """Return the layer's output, the residual stream and the router's state, each [B, ...]."""
        x_BD, residual_BD = self.attention_entry(hidden_BD, residual_BD)
        x_BD, residual_BD = self.expert_entry(self._attend(x_BD, rotary, position, slots), residual_BD)
        classes_BK, weights_BK, router_BR = self.route(x_BD, router_BR, balancing_bias_C)
        return self._experts(x_BD, classes_BK.tolist(), weights_BK), residual_BD, router_BR

    def _attend(self, x_BD: Tensor, rotary: StepRotary, position: Positions, slots: Slots | None) -> Tensor:
        config, cache, batch = self.config, self.cache, x_BD.shape[0]
        queries, keys, head_dim = config.query_heads, config.kv_heads, config.head_dim
        heads, half = queries + keys, keys * head_dim // 2
        z_BQ, current_BQ, delayed_BQ = F.linear(x_BD, cache.projection_QD).split_with_sizes(
            [heads * head_dim, half, half], dim=-1
        )
        windows_BWQ = torch.cat([cache.before_BWQ, z_BQ.unsqueeze(1)], dim=1)
        cache.before_BWQ = windows_BWQ[:, 1:]
        windows_hBI = windows_BWQ.view(batch, -1, heads, head_dim).permute(2, 0, 1, 3).reshape(heads, batch, -1)
        u_BhP = at_least_fp32(torch.bmm(windows_hBI, self.kernel_hIP)).transpose(0, 1) + self.bias_hP
        u_BhP += self.skip_hh @ at_least_fp32(z_BQ).view(batch, heads, head_dim)
        length_Bh1 = torch.linalg.vector_norm(u_BhP, dim=-1, keepdim=True).clamp_min_(self.smallest)
        y_BhP = u_BhP * rotary.cos_SP[position]
        y_BhP.addcmul_(u_BhP.index_select(-1, rotary.swapped_P), rotary.sin_SP[position])
        y_BhP = y_BhP.mul_(self.scale_h1 / length_Bh1).to(x_BD.dtype)

        v_BQ = torch.cat([current_BQ, cache.delayed_B1Q[:, 0]], dim=-1)
        cache.delayed_B1Q = delayed_BQ.unsqueeze(1)
        q_BH1P, k_BJ1P = y_BhP.unsqueeze(2).split_with_sizes([queries, keys], dim=1)
        y_BH1P = cache.attend(q_BH1P, k_BJ1P, v_BQ.view(batch, keys, 1, head_dim), slots)
        return F.linear(y_BH1P.reshape(batch, -1), self.output_DQ)

    def route(
        self, x_BD: Tensor, previous_BR: Tensor | None, balancing_bias_C: Tensor
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        """Classes and weights [B, K] of each token, and the router's state."""
        router = self.router
        if not isinstance(router, Router):
            routing = router(x_BD, previous_BR, balancing_bias_C)
            return routing.classes_TK, routing.weights_TK, routing.state_TR
        state_BR = F.linear(x_BD, router.down.weight, router.down.bias)
        if previous_BR is not None:
            state_BR = torch.addcmul(state_BR, previous_BR, router.previous_scale)
        y_BR = router.norm(state_BR)
        y_BR = F.gelu(F.linear(y_BR, router.first.weight, router.first.bias))
        y_BR = F.gelu(F.linear(y_BR, router.second.weight, router.second.bias))
        shares_BC = at_least_fp32(F.linear(y_BR, router.output.weight)).softmax(dim=-1)
        classes_BK = (shares_BC + balancing_bias_C).topk(router.classes_per_token, dim=-1).indices
        return classes_BK, shares_BC.gather(-1, classes_BK), state_BR

    def _experts(self, x_BD: Tensor, classes_BK: list[list[int]], weights_BK: Tensor) -> Tensor:
        """Return each token's weighted experts; every expert's matrices are read once, for all tokens it has."""
        if classes_BK == [[chosen] for (chosen, *_) in classes_BK[:1]]:
            return self._expert(x_BD, classes_BK[0][0]) * weights_BK.to(x_BD.dtype)
        rows_by_class: dict[int, list[tuple[int, int]]] = {}
        for row, classes in enumerate(classes_BK):
            for choice, chosen in enumerate(classes):
                rows_by_class.setdefault(chosen, []).append((row, choice))
        y_BD = torch.zeros_like(x_BD)
        for chosen, places in rows_by_class.items():
            row_N, choice_N = torch.tensor(places).unbind(1)
            y_ND = self._expert(x_BD.index_select(0, row_N), chosen)
            y_BD.index_add_(0, row_N, y_ND * weights_BK[row_N, choice_N].to(x_BD.dtype).unsqueeze(1))
        return y_BD

    def _expert(self, x_ND: Tensor, chosen: int) -> Tensor:
        if chosen == self.config.experts:
            return x_ND if self.config.skip_rule == "identity" else torch.zeros_like(x_ND)
        gate_NF, up_NF = F.linear(x_ND, self.gate_up_E[chosen]).chunk(2, dim=-1)
        return F.linear(F.silu(gate_NF).mul_(up_NF), self.down_E[chosen])


class ModelStep:
    """The whole model up to its head, for one token of each sequence."""

    def __init__(self, layers: list[LayerStep], head_entry: StageEntry, balancing_bias_LC: Tensor) -> None:
        self.layers = layers
        self.head_entry = _Entry(head_entry)
        self.balancing_bias_C = balancing_bias_LC.unbind()
        self._rotary: tuple[RotaryTable, StepRotary] | None = None

    def __call__(self, hidden_BD: Tensor, table: RotaryTable, position: Positions, slots: Slots | None) -> Tensor:
        """Embeddings to normed hidden states [B, D]."""
        if self._rotary is None or self._rotary[0] is not table:
            self._rotary = table, StepRotary(table, self.layers[0].config.head_dim)
        rotary = self._rotary[1]
        residual_BD: Tensor | None = None
        router_BR: Tensor | None = None
        for layer, bias_C in zip(self.layers, self.balancing_bias_C, strict=True):
            hidden_BD, residual_BD, router_BR = layer(
                hidden_BD, residual_BD, router_BR, bias_C, rotary, position, slots
            )
        return self.head_entry(hidden_BD, residual_BD)[0]


def _mean_skip_matrix(queries: int, keys: int, dtype: torch.dtype) -> Tensor:
    """Query head h gets (q_h + k_j) / 2 with its key head j; key head j the mean of that over its queries."""
    group = queries // keys
    matrix_hh = torch.zeros(queries + keys, queries + keys, dtype=dtype)
    for query in range(queries):
        key = queries + query // group
        matrix_hh[query, query] = matrix_hh[query, key] = 0.5
        matrix_hh[key, query] = 0.5 / group
        matrix_hh[key, key] = 0.5
    return matrix_hh
