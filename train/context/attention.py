"""Causal attention over a whole sequence of which each rank holds two chunks.

Of rank i's queries those of both chunks see the early chunk of every rank before it, and those of its late chunk
both chunks of every rank after it: all of these keys, without a mask. Only its own tokens need a causal mask:

    keys of        the rank itself    ranks j < i        ranks j > i
    queries        both, causal       both               late chunk
    of keys        both               early chunk        both

Those are 2c products of a chunk with a chunk on every rank (the causal part is two of them). How the keys come is
the matter of the exchange: gather.py or ring.py. The parts are joined by their log-sum-exp (blocks.py). Kept for
backward are a rank's queries, keys, values, output and log-sum-exp.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from zslurm.train.context.blocks import BlockAttention, Labels, merge
from zslurm.train.context.bytes import Attention
from zslurm.train.context.context_parallel import ContextParallel
from zslurm.train.context.flash import choose_blocks
from zslurm.train.context.gather import GatheredKeys
from zslurm.train.context.key_parts import KeyExchange, KeyPart, early
from zslurm.train.context.ring import RingOfKeys


class SequenceLabels(NamedTuple):
    """Which keys of a sequence a query may see besides causality: those with its label, and itself.

    Attributes:
        queries_BS: of this rank's tokens.
        keys_cBS: of every rank's.
    """

    queries_BS: Tensor
    keys_cBS: Tensor


def attend_in_context(
    context: ContextParallel,
    q_BHSP: Tensor,
    k_BJSP: Tensor,
    v_BJSP: Tensor,
    labels: SequenceLabels | None = None,
    blocks: BlockAttention | None = None,
) -> Tensor:
    """Return causal grouped-query attention with scale 1 / sqrt(P), [B, S, H * P].

    Args:
        context: the ranks that share the sequences.
        q_BHSP: queries of this rank's two chunks.
        k_BJSP: keys of the same tokens.
        v_BJSP: values of the same tokens.
        labels: documents and padding; without them a token sees all before it.
        blocks: what computes a part; chosen by device and format if None.
    """
    blocks = blocks or choose_blocks(q_BHSP, labelled=labels is not None)
    how = context.attention_for(k_BJSP)
    y_BHSP: Tensor = _Attention.apply(q_BHSP, k_BJSP, v_BJSP, context, how, labels, blocks)
    return y_BHSP.transpose(1, 2).flatten(2)


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        q_BHSP: Tensor,
        k_BJSP: Tensor,
        v_BJSP: Tensor,
        context: ContextParallel,
        how: Attention,
        labels: SequenceLabels | None,
        blocks: BlockAttention,
    ) -> Tensor:
        out_BHSP = lse_BHS = None
        for part in _exchange(context, how, k_BJSP, v_BJSP, backward=False).parts():
            k_part, v_part = part.kv_2BJSP
            part_out, part_lse = blocks.forward(
                _seen_by(part, q_BHSP), k_part, v_part, part.causal, _labels(part, labels)
            )
            if out_BHSP is None or lse_BHS is None:
                out_BHSP, lse_BHS = part_out.to(part_lse.dtype), part_lse
            else:
                merge(_seen_by(part, out_BHSP), _seen_by(part, lse_BHS), part_out, part_lse)
        assert out_BHSP is not None and lse_BHS is not None
        out_BHSP = out_BHSP.to(q_BHSP.dtype)
        ctx.save_for_backward(q_BHSP, k_BJSP, v_BJSP, out_BHSP, lse_BHS, *(labels or ()))
        ctx.context, ctx.how, ctx.blocks = context, how, blocks
        return out_BHSP

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_BHSP: Tensor) -> tuple[Tensor | None, ...]:
        q_BHSP, k_BJSP, v_BJSP, out_BHSP, lse_BHS, *saved = ctx.saved_tensors
        labels = SequenceLabels(*saved) if saved else None
        wide = lse_BHS.dtype
        grad_q_BHSP = torch.zeros_like(q_BHSP, dtype=wide)
        exchange = _exchange(ctx.context, ctx.how, k_BJSP, v_BJSP, backward=True)
        for part in exchange.parts():
            grad, q, out, lse = (_seen_by(part, x) for x in (grad_BHSP, q_BHSP, out_BHSP, lse_BHS))
            grad_q, grad_k, grad_v = ctx.blocks.backward(
                grad, q, *part.kv_2BJSP, out, lse, part.causal, _labels(part, labels)
            )
            _seen_by(part, grad_q_BHSP).add_(grad_q)
            exchange.add(part, torch.stack([grad_k, grad_v]).to(wide))
        grad_k_BJSP, grad_v_BJSP = exchange.gradient().to(k_BJSP.dtype)
        return grad_q_BHSP.to(q_BHSP.dtype), grad_k_BJSP, grad_v_BJSP, None, None, None, None


def _exchange(
    context: ContextParallel, how: Attention, k_BJSP: Tensor, v_BJSP: Tensor, *, backward: bool
) -> KeyExchange:
    kv_2BJSP = torch.stack([k_BJSP, v_BJSP])
    if how == "ring":
        return RingOfKeys(context, kv_2BJSP, backward=backward)
    return GatheredKeys(context, kv_2BJSP)


def _seen_by(part: KeyPart, x_BHSX: Tensor) -> Tensor:
    """Return the rows of the queries that see a part."""
    length = x_BHSX.shape[2]
    return x_BHSX.narrow(2, length // 2, length // 2) if part.late_queries else x_BHSX


def _labels(part: KeyPart, labels: SequenceLabels | None) -> Labels | None:
    if labels is None:
        return None
    keys_cBS = labels.keys_cBS[part.ranks]
    if part.early_keys:
        keys_cBS = early(keys_cBS, -1)
    queries_BS = labels.queries_BS
    length = queries_BS.shape[1]
    return Labels(
        queries_BS[:, length // 2 :] if part.late_queries else queries_BS, keys_cBS.movedim(0, 1).flatten(1)
    )
