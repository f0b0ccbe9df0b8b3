"""The output head and its loss: fp32 matrix product with the tied embedding, summed cross-entropy.

With a vocabulary of 262,272 the fp32 logits of one sequence of 4,096 tokens are 4.3 GB, and their gradient as
much again. The loss therefore runs over chunks of tokens, and takes each chunk's gradient while its logits
exist: memory for one chunk and its softmax, and three matrix products in all, as without chunks. What it keeps
until backward is the gradient of the embedding in fp32 and that of the hidden states. It cannot be
differentiated twice.

Logits, softmax and loss are in at least fp32. The two products of the gradient are, as everywhere in backward,
in the parameters' format: with bf16 parameters their results are rounded to bf16 anyway.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from train.model.precision import at_least_fp32

IGNORED_TARGET = -100
"""Target of a position that does not count in the loss (torch's own convention)."""

_CHUNK_ELEMENTS = {"cpu": 1 << 19}
"""Logits of one chunk: on a CPU what its caches hold; elsewhere 1 GiB of fp32. Twice, for their softmax."""
_CHUNK_ELEMENTS_ELSEWHERE = 1 << 28
_WIDENED_ELEMENTS = 1 << 17
"""Weights that decoding converts to fp32 at one time."""
_CHUNK_TOKENS = 64
"""Tokens of the smallest chunk: fewer make matrix products slow, and every chunk adds to the whole gradient."""


def logits(x_BSD: Tensor, embedding_VD: Tensor) -> Tensor:
    """Logits [B, S, V] of the normed hidden states, in at least fp32."""
    x_BSD = at_least_fp32(x_BSD)
    if embedding_VD.dtype == x_BSD.dtype or x_BSD.requires_grad or embedding_VD.device.type != "cpu":
        return F.linear(x_BSD, at_least_fp32(embedding_VD))
    # A few rows at a time are widened in the cache; all of them would go through memory.
    chunks = embedding_VD.split(max(1, _WIDENED_ELEMENTS // embedding_VD.shape[1]))
    return torch.cat([F.linear(x_BSD, at_least_fp32(chunk)) for chunk in chunks], dim=-1)


def summed_cross_entropy(
    x_TD: Tensor, embedding_VD: Tensor, targets_T: Tensor, *, chunk_tokens: int | None = None
) -> Tensor:
    """Sum over tokens of -log softmax(logits)[target], in nats, a scalar in at least fp32.

    Args:
        x_TD: normed hidden states.
        embedding_VD: tied embedding.
        targets_T: int64 classes; positions of IGNORED_TARGET add nothing.
        chunk_tokens: tokens whose logits exist at one time; chosen by the device and the vocabulary if None.
    """
    elements = _CHUNK_ELEMENTS.get(x_TD.device.type, _CHUNK_ELEMENTS_ELSEWHERE)
    chunk = chunk_tokens or max(_CHUNK_TOKENS, elements // embedding_VD.shape[0])
    wanted = torch.is_grad_enabled() and (x_TD.requires_grad or embedding_VD.requires_grad)
    loss: Tensor = _SummedCrossEntropy.apply(x_TD, embedding_VD, targets_T, chunk, wanted)
    return loss


def _add_product(total: Tensor, left: Tensor, right: Tensor) -> None:
    """Add a product to a total of at least its format."""
    if left.dtype == total.dtype:
        total.addmm_(left, right)
    else:
        total += left @ right


class _SummedCrossEntropy(torch.autograd.Function):
    """Gradient of the logits is softmax - onehot; it is taken in forward and only scaled in backward."""

    @staticmethod
    def forward(
        ctx: Any, x_TD: Tensor, embedding_VD: Tensor, targets_T: Tensor, chunk: int, wanted: bool
    ) -> Tensor:
        weight_VD = at_least_fp32(embedding_VD)
        loss = weight_VD.new_zeros(())
        grad_x_TD = torch.empty_like(x_TD) if wanted else None
        grad_weight_VD = torch.zeros_like(weight_VD) if wanted else None
        chunk = max(1, min(chunk, len(x_TD)))
        logits_TV, softmax_TV = weight_VD.new_empty(2, chunk, len(weight_VD)).unbind()
        for start in range(0, len(x_TD), chunk):
            x = at_least_fp32(x_TD[start : start + chunk])
            target = targets_T[start : start + chunk, None]
            counted = target != IGNORED_TARGET
            target = target.where(counted, 0)
            logits, softmax = logits_TV[: len(x)], softmax_TV[: len(x)]
            torch.mm(x, weight_VD.T, out=logits)
            torch.softmax(logits, dim=-1, out=softmax)
            # The largest probability is exp(largest logit) / sum of exponentials, and never small.
            log_sum = logits.amax(dim=-1, keepdim=True) - softmax.amax(dim=-1, keepdim=True).log()
            loss += (log_sum - logits.gather(-1, target)).where(counted, 0).sum()
            if grad_x_TD is not None and grad_weight_VD is not None:
                grad_logits = softmax.scatter_add_(-1, target, -torch.ones_like(x[:, :1])).mul_(counted)
                narrow = grad_logits.to(embedding_VD.dtype)
                grad_x_TD[start : start + chunk] = narrow @ embedding_VD
                _add_product(grad_weight_VD, narrow.T, x_TD[start : start + chunk])
        if wanted:
            ctx.save_for_backward(grad_x_TD, grad_weight_VD)
        return loss

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_loss: Tensor) -> tuple[Tensor, Tensor, None, None, None]:
        grad_x_TD, grad_weight_VD = ctx.saved_tensors
        return grad_x_TD * grad_loss.to(grad_x_TD.dtype), grad_weight_VD * grad_loss, None, None, None
