"""Attention by torch: scaled_dot_product_attention, and a plainer way for short sequences on a CPU.

On GPUs (and for masks and long sequences) torch chooses the kernel. Its flash kernel for CPUs
spends most of a short sequence on bookkeeping, in bf16 two thirds. Up to 1,024 tokens we therefore take blocks
of queries with matrix products against the keys up to the block's end, query heads that share a key head in one
product. Blocks skip what causality hides: 5/8 of the products with four blocks. The probabilities are kept for
backward: S (S + block) / 2 per query head, in the parameters' format. Scores and softmax are in at least fp32.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from zslurm.train.model.precision import at_least_fp32

_LONGEST = 1024
_BLOCK = 64


def attend(q_BHSP: Tensor, k_BJSP: Tensor, v_BJSP: Tensor, mask_B1SS: Tensor | None) -> Tensor:
    """Grouped-query attention with scale 1 / sqrt(P), causal unless a mask is given; returns [B, S, H * P]."""
    short_on_cpu = q_BHSP.device.type == "cpu" and q_BHSP.shape[2] <= _LONGEST
    if mask_B1SS is None and short_on_cpu:
        y_BSHP: Tensor = _CausalBlocks.apply(q_BHSP, k_BJSP, v_BJSP, _BLOCK)
        return y_BSHP.flatten(2)
    return attend_by_sdpa(q_BHSP, k_BJSP, v_BJSP, mask_B1SS)


def attend_by_sdpa(q_BHSP: Tensor, k_BJSP: Tensor, v_BJSP: Tensor, mask_B1SS: Tensor | None) -> Tensor:
    """As `attend`, always by torch's scaled_dot_product_attention.

    No fused kernel for GPUs takes a mask and grouped queries: with a mask, keys and values are repeated.
    """
    if mask_B1SS is not None and q_BHSP.device.type == "cuda":
        group = q_BHSP.shape[1] // k_BJSP.shape[1]
        k_BJSP, v_BJSP = (x.repeat_interleave(group, dim=1) for x in (k_BJSP, v_BJSP))
    y_BHSP = F.scaled_dot_product_attention(
        q_BHSP, k_BJSP, v_BJSP, attn_mask=mask_B1SS, is_causal=mask_B1SS is None, enable_gqa=True
    )
    return y_BHSP.transpose(1, 2).flatten(2)


class _CausalBlocks(torch.autograd.Function):
    """Tensors [X, N, P]: X a key head of a sequence, N its query heads times the block's tokens."""

    @staticmethod
    def forward(ctx: Any, q_BHSP: Tensor, k_BJSP: Tensor, v_BJSP: Tensor, block: int) -> Tensor:
        batch, queries, length, head_dim = q_BHSP.shape
        keys = k_BJSP.shape[1]
        q_BJGSP = q_BHSP.unflatten(1, (keys, -1))
        k_XSP, v_XSP = k_BJSP.flatten(0, 1).contiguous(), v_BJSP.flatten(0, 1).contiguous()
        wide_k_XSP = at_least_fp32(k_XSP)
        hidden_NN = torch.full((block, block), -math.inf, dtype=wide_k_XSP.dtype).triu_(1)
        y_BSHP = q_BHSP.new_empty(batch, length, queries, head_dim)
        saved: list[Tensor] = []
        for start in range(0, length, block):
            end = min(start + block, length)
            rows = end - start
            q_XNP = _rows(q_BJGSP[:, :, :, start:end])
            wide_XNP = at_least_fp32(q_XNP) * (1 / math.sqrt(head_dim))
            scores_XNS = torch.bmm(wide_XNP, wide_k_XSP[:, :end].mT)
            scores_XNS.unflatten(1, (-1, rows))[..., start:].add_(hidden_NN[:rows, :rows])
            shares_XNS = scores_XNS.softmax(dim=-1).to(q_XNP.dtype)
            y_XNP = torch.bmm(shares_XNS, v_XSP[:, :end])
            y_BSJGP = y_BSHP[:, start:end].unflatten(2, (keys, -1))
            y_BSJGP.copy_(y_XNP.view(batch, keys, -1, rows, head_dim).permute(0, 3, 1, 2, 4))
            saved += [q_XNP, shares_XNS]
        ctx.save_for_backward(k_XSP, v_XSP, *saved)
        ctx.shapes = q_BHSP.shape, k_BJSP.shape, block
        return y_BSHP

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_BSHP: Tensor) -> tuple[Tensor, Tensor, Tensor, None]:
        k_XSP, v_XSP, *saved = ctx.saved_tensors
        (batch, queries, length, head_dim), key_shape, block = ctx.shapes
        keys = key_shape[1]
        wide = at_least_fp32(k_XSP[:0]).dtype
        scale = 1 / math.sqrt(head_dim)
        grad_q_BHSP = grad_BSHP.new_empty(batch, queries, length, head_dim)
        grad_k_XSP = torch.zeros_like(k_XSP, dtype=wide)
        grad_v_XSP = torch.zeros_like(v_XSP, dtype=wide)
        for start, q_XNP, shares_XNS in zip(range(0, length, block), saved[::2], saved[1::2], strict=True):
            end = min(start + block, length)
            grad_XNP = _rows(grad_BSHP[:, start:end].unflatten(2, (keys, -1)).permute(0, 2, 3, 1, 4))
            grad_v_XSP[:, :end] += torch.bmm(shares_XNS.mT, grad_XNP)
            grad_shares_XNS = torch.bmm(grad_XNP, v_XSP[:, :end].mT)
            grad_scores_XNS = torch._softmax_backward_data(grad_shares_XNS, shares_XNS, -1, shares_XNS.dtype)
            grad_k_XSP[:, :end].add_(torch.bmm(grad_scores_XNS.mT, q_XNP), alpha=scale)
            grad_q_XNP = torch.bmm(grad_scores_XNS, k_XSP[:, :end]).mul_(scale)
            rows_BJGSP = grad_q_XNP.view(batch, keys, -1, end - start, head_dim)
            grad_q_BHSP.unflatten(1, (keys, -1))[:, :, :, start:end] = rows_BJGSP
        grad_k_BJSP = grad_k_XSP.to(k_XSP.dtype).view(key_shape)
        return grad_q_BHSP, grad_k_BJSP, grad_v_XSP.to(v_XSP.dtype).view(key_shape), None


def _rows(x_BJGSP: Tensor) -> Tensor:
    """[B, J, G, S, P] as contiguous [B * J, G * S, P]."""
    return x_BJGSP.flatten(2, 3).flatten(0, 1).contiguous()
