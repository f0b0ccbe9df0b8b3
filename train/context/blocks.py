"""Attention of some queries to some keys, with the log-sum-exp that lets parts be joined.

Over parts of the keys b with results (out_b, lse_b) the whole is, in at least fp32,

    out <- out - sigmoid(lse_b - lse) (out - out_b)         lse <- lse - logsigmoid(lse - lse_b)

and the gradient of each part follows only from the whole's out and lse:

    p = exp(q k / sqrt(P) - lse)      dv = p^T g     ds = p (g v^T - sum(g out))     dq, dk = ds k, ds^T q

Two ways compute a part, both with memory linear in its length:

    BlockedProducts   matrix products over blocks of queries, everything in at least fp32: CPUs, any format, and
                      documents or padding (with labels, see there)
    TorchFlash        torch's flash kernel, on GPUs in 16 bits without labels (flash.py)

All tensors are [B, H, S, P] for H query heads, [B, J, S, P] for J key heads; lse is [B, H, S].
"""

from __future__ import annotations

import math
from typing import NamedTuple, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

_ELEMENTS = {"cpu": 1 << 21}
_ELEMENTS_ELSEWHERE = 1 << 27
"""Scores that exist at one time, of one block of queries."""
_MOST_ROWS = {"cpu": 64}
_MOST_ROWS_ELSEWHERE = 1024
_FEWEST_ROWS = 16


class Labels(NamedTuple):
    """A query sees those keys that have its label, and in a causal part itself."""

    queries_BS: Tensor
    keys_BS: Tensor


class BlockAttention(Protocol):
    """Attention of queries to one part of the keys: all of them, or causal if both are the same tokens."""

    def forward(
        self, q_BHSP: Tensor, k_BJSP: Tensor, v_BJSP: Tensor, causal: bool, labels: Labels | None
    ) -> tuple[Tensor, Tensor]:
        """Return out, and lse in at least fp32: -inf (and out 0) for a query that sees none of the keys."""

    def backward(
        self,
        grad_BHSP: Tensor,
        q_BHSP: Tensor,
        k_BJSP: Tensor,
        v_BJSP: Tensor,
        out_BHSP: Tensor,
        lse_BHS: Tensor,
        causal: bool,
        labels: Labels | None,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return the part's share in the gradients of q, k and v; out and lse are of all keys."""


def merge(out_BHSP: Tensor, lse_BHS: Tensor, part_BHSP: Tensor, part_lse_BHS: Tensor) -> None:
    """Join a part with what others have made, in place; these have seen at least one key for each query."""
    share_BHS1 = torch.sigmoid(part_lse_BHS - lse_BHS).unsqueeze(-1)
    out_BHSP -= share_BHS1 * (out_BHSP - part_BHSP)
    lse_BHS -= F.logsigmoid(lse_BHS - part_lse_BHS)


class BlockedProducts:
    """By matrix products; [X, N, P]: X a key head of a sequence, N its query heads times the block's tokens."""

    def forward(
        self, q_BHSP: Tensor, k_BJSP: Tensor, v_BJSP: Tensor, causal: bool, labels: Labels | None
    ) -> tuple[Tensor, Tensor]:
        """See `BlockAttention`."""
        keys = k_BJSP.shape[1]
        k_XSP, v_XSP = _wide(k_BJSP).flatten(0, 1), _wide(v_BJSP).flatten(0, 1)
        out_BHSP = torch.empty_like(q_BHSP, dtype=k_XSP.dtype, memory_format=torch.contiguous_format)
        lse_BHS = out_BHSP.new_empty(q_BHSP.shape[:3])
        for start, end in _blocks(q_BHSP, k_BJSP):
            seen = end if causal else k_XSP.shape[1]
            scores_XNS = _scores(q_BHSP, k_XSP, start, end, causal, labels)
            lse_XN = scores_XNS.logsumexp(dim=-1)
            shares_XNS = scores_XNS.sub_(_finite(lse_XN).unsqueeze(-1)).exp_()
            out_XNP = torch.bmm(shares_XNS, v_XSP[:, :seen])
            out_BHSP[:, :, start:end] = _heads(out_XNP, q_BHSP.shape[0], keys, end - start)
            lse_BHS[:, :, start:end] = _heads(lse_XN.unsqueeze(-1), q_BHSP.shape[0], keys, end - start)[..., 0]
        return out_BHSP, lse_BHS

    def backward(
        self,
        grad_BHSP: Tensor,
        q_BHSP: Tensor,
        k_BJSP: Tensor,
        v_BJSP: Tensor,
        out_BHSP: Tensor,
        lse_BHS: Tensor,
        causal: bool,
        labels: Labels | None,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """See `BlockAttention`; all gradients are in at least fp32."""
        batch, keys = k_BJSP.shape[:2]
        scale = 1 / math.sqrt(q_BHSP.shape[-1])
        k_XSP, v_XSP = _wide(k_BJSP).flatten(0, 1), _wide(v_BJSP).flatten(0, 1)
        grad_q_BHSP = torch.empty_like(q_BHSP, dtype=k_XSP.dtype, memory_format=torch.contiguous_format)
        grad_k_XSP, grad_v_XSP = torch.zeros_like(k_XSP), torch.zeros_like(v_XSP)
        along_BHS1 = (_wide(grad_BHSP) * _wide(out_BHSP)).sum(dim=-1, keepdim=True)
        for start, end in _blocks(q_BHSP, k_BJSP):
            seen = end if causal else k_XSP.shape[1]
            rows = slice(start, end)
            scores_XNS = _scores(q_BHSP, k_XSP, start, end, causal, labels)
            lse_XN1, along_XN1 = (_rows(x[:, :, rows], keys) for x in (lse_BHS.unsqueeze(-1), along_BHS1))
            shares_XNS = scores_XNS.sub_(lse_XN1).exp_()
            grad_XNP = _rows(_wide(grad_BHSP[:, :, rows]), keys)
            grad_v_XSP[:, :seen] += torch.bmm(shares_XNS.mT, grad_XNP)
            grad_scores_XNS = torch.bmm(grad_XNP, v_XSP[:, :seen].mT).sub_(along_XN1).mul_(shares_XNS)
            q_XNP = _rows(_wide(q_BHSP[:, :, rows]), keys)
            grad_k_XSP[:, :seen].add_(torch.bmm(grad_scores_XNS.mT, q_XNP), alpha=scale)
            grad_q_XNP = torch.bmm(grad_scores_XNS, k_XSP[:, :seen]).mul_(scale)
            grad_q_BHSP[:, :, rows] = _heads(grad_q_XNP, batch, keys, end - start)
        return grad_q_BHSP, grad_k_XSP.view(k_BJSP.shape), grad_v_XSP.view(v_BJSP.shape)


def _wide(x: Tensor) -> Tensor:
    return x.to(torch.promote_types(x.dtype, torch.float32))


def _finite(lse: Tensor) -> Tensor:
    """Return what to subtract from scores: if no key is seen all of them are -inf and must stay -inf."""
    return lse.masked_fill(lse == -math.inf, 0)


def _blocks(q_BHSP: Tensor, k_BJSP: Tensor) -> list[tuple[int, int]]:
    """Return the start and the end of each block of queries."""
    kind, length = q_BHSP.device.type, q_BHSP.shape[2]
    elements = _ELEMENTS.get(kind, _ELEMENTS_ELSEWHERE) // (q_BHSP.shape[0] * q_BHSP.shape[1] * k_BJSP.shape[2])
    rows = max(_FEWEST_ROWS, min(_MOST_ROWS.get(kind, _MOST_ROWS_ELSEWHERE), elements))
    return [(start, min(start + rows, length)) for start in range(0, length, rows)]


def _scores(q_BHSP: Tensor, k_XSP: Tensor, start: int, end: int, causal: bool, labels: Labels | None) -> Tensor:
    """Return the scores [X, N, S] of a block of queries, -inf if a key is not seen."""
    batch, heads, _, head_dim = q_BHSP.shape
    keys, seen = len(k_XSP) // batch, end if causal else k_XSP.shape[1]
    q_XNP = _rows(_wide(q_BHSP[:, :, start:end]), keys) * (1 / math.sqrt(head_dim))
    scores_XNS = torch.bmm(q_XNP, k_XSP[:, :seen].mT)
    scores_BHSS = scores_XNS.view(batch, heads, end - start, seen)
    if labels is not None:
        other_BSS = labels.queries_BS[:, start:end, None] != labels.keys_BS[:, None, :seen]
        if causal:
            other_BSS.diagonal(start, 1, 2).fill_(False)
        scores_BHSS.masked_fill_(other_BSS.unsqueeze(1), -math.inf)
    if causal:
        size = end - start
        after_SS = torch.ones(size, size, dtype=torch.bool, device=q_BHSP.device).triu_(1)
        scores_BHSS[..., start:].masked_fill_(after_SS, -math.inf)
    return scores_XNS


def _rows(x_BHSP: Tensor, keys: int) -> Tensor:
    """[B, H, S, P] as contiguous [B * J, G * S, P]."""
    return x_BHSP.unflatten(1, (keys, -1)).flatten(2, 3).flatten(0, 1).contiguous()


def _heads(x_XNP: Tensor, batch: int, keys: int, rows: int) -> Tensor:
    """[B * J, G * S, P] as [B, H, S, P]."""
    return x_XNP.view(batch, -1, rows, x_XNP.shape[-1])
