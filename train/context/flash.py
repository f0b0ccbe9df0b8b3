"""A part of attention by torch's flash kernel: on GPUs, in 16 bits.

The kernel returns the log-sum-exp, and its backward takes the whole sequence's output and log-sum-exp as well as
a part's. Without a mask the query heads of a key head are rows of one head, so keys are nowhere repeated; in the
causal part, which is a rank's own tokens, they are, and their gradients are summed in fp32.

The same calls go to torch's flash kernel for CPUs, which is how the tests reach this code: torch chooses it by the
device, in any format.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from zslurm.train.context.blocks import BlockAttention, BlockedProducts, Labels

_MULTIPLE = 8
_LARGEST_HEAD = 256
_FORMATS = (torch.bfloat16, torch.float16)
_aten: Any = torch.ops.aten


def choose_blocks(q_BHSP: Tensor, *, labelled: bool) -> BlockAttention:
    """Return what computes the parts of these queries: the flash kernel if it can."""
    head_dim = q_BHSP.shape[-1]
    fits = q_BHSP.dtype in _FORMATS and head_dim % _MULTIPLE == 0 and head_dim <= _LARGEST_HEAD
    return TorchFlash() if q_BHSP.device.type == "cuda" and fits and not labelled else BlockedProducts()


class TorchFlash:
    """See `BlockAttention`; one object for one attention, forward and backward."""

    def __init__(self) -> None:
        # The kernel's random state, of which backward wants to see some though nothing is dropped.
        self._philox: tuple[Tensor, Tensor] | None = None

    def forward(
        self, q_BHSP: Tensor, k_BJSP: Tensor, v_BJSP: Tensor, causal: bool, labels: Labels | None
    ) -> tuple[Tensor, Tensor]:
        """See `BlockAttention`."""
        assert labels is None
        q, k, v = _heads(q_BHSP, k_BJSP, v_BJSP, causal)
        out, lse = self._forward(q, k, v, causal)
        shape = q_BHSP.shape
        return out.reshape(shape), lse[..., : q.shape[2]].reshape(shape[:-1])

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
        """See `BlockAttention`."""
        assert labels is None
        q, k, v = _heads(q_BHSP, k_BJSP, v_BJSP, causal)
        grad, out, lse = (x.reshape(*q.shape[:3], *x.shape[3:]) for x in (grad_BHSP, out_BHSP, lse_BHS))
        grad_q, grad_k, grad_v = self._backward(grad, q, k, v, out, lse.contiguous(), causal)
        if causal:
            wide = lse_BHS.dtype
            grad_k, grad_v = (
                x.unflatten(1, (k_BJSP.shape[1], -1)).sum(dim=2, dtype=wide) for x in (grad_k, grad_v)
            )
        return grad_q.reshape(q_BHSP.shape), grad_k, grad_v

    def _forward(self, q: Tensor, k: Tensor, v: Tensor, causal: bool) -> tuple[Tensor, Tensor]:
        scale = 1 / math.sqrt(q.shape[-1])
        if q.device.type == "cpu":
            out, lse = _aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, 0.0, causal, scale=scale)
            return out, lse
        out, lse, _, _, _, _, *philox, _ = _aten._scaled_dot_product_flash_attention(
            q, k, v, 0.0, causal, False, scale=scale
        )
        self._philox = philox[0], philox[1]
        return out, lse

    def _backward(
        self, grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, causal: bool
    ) -> tuple[Tensor, Tensor, Tensor]:
        scale = 1 / math.sqrt(q.shape[-1])
        if q.device.type == "cpu":
            gradients = _aten._scaled_dot_product_flash_attention_for_cpu_backward(
                grad, q, k, v, out, lse, 0.0, causal, scale=scale
            )
        else:
            assert self._philox is not None
            gradients = _aten._scaled_dot_product_flash_attention_backward(
                grad,
                q,
                k,
                v,
                out,
                lse,
                None,
                None,
                q.shape[2],
                k.shape[2],
                0.0,
                causal,
                *self._philox,
                scale=scale,
            )
        grad_q, grad_k, grad_v = gradients
        return grad_q, grad_k, grad_v


def _heads(q_BHSP: Tensor, k_BJSP: Tensor, v_BJSP: Tensor, causal: bool) -> tuple[Tensor, Tensor, Tensor]:
    """Give queries and keys the same number of heads: H if causal, else J with H / J times the queries."""
    q_BJGSP = q_BHSP.unflatten(1, (k_BJSP.shape[1], -1))
    if not causal:
        return q_BJGSP.flatten(2, 3), k_BJSP, v_BJSP
    repeats = q_BJGSP.shape[2]
    return q_BHSP, k_BJSP.repeat_interleave(repeats, dim=1), v_BJSP.repeat_interleave(repeats, dim=1)
