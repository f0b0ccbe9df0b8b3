"""The output head and its loss: fp32 logits from the tied embedding, summed cross-entropy.

With a vocabulary of 262,272 the fp32 logits of one sequence of 4,096 tokens are 4.3 GB, and their gradient as
much again. The loss therefore runs over chunks of tokens, and takes each chunk's gradient while its logits
exist: memory for one chunk and its softmax, and three matrix products in all, as without chunks. What it keeps
until backward is the gradient of the embedding in fp32 and that of the hidden states. It cannot be
differentiated twice.

The z-loss (PaLM, arXiv 2204.02311, section 5) is a weight times the square of each token's log-sum-exp Z: it
keeps Z near 0, so that logits do not drift, and adds 2 weight Z softmax to the gradient of the logits. It is taken
from the same chunk and costs one more pass over it.

Logits, softmax and loss are in at least fp32. On GPUs bf16 parameters are multiplied as they are, with fp32
results (`zslurm.kernels.head`): no copy of the embedding in fp32 is made, and its gradient is summed in fp32 over
the chunks. Elsewhere they are widened for the logits. The operands of the gradient's two products are, as
everywhere in backward, in the parameters' format.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from zslurm.kernels.head import add_product, keeps_narrow, losses, product
from zslurm.train.model.precision import at_least_fp32

IGNORED_TARGET = -100
"""Target of a position that does not count in the loss (torch's own convention)."""

_CHUNK_ELEMENTS = {"cpu": 1 << 21}
"""Probabilities of one chunk: on a CPU 8 MiB of fp32, so that few chunks add to the weight's gradient and a shared
cache still holds one; elsewhere 1 GiB."""
_CHUNK_ELEMENTS_ELSEWHERE = 1 << 28
_PART_ELEMENTS_ON_CPU = 1 << 19
"""Logits that they are made of at one time: on a CPU 2 MiB, which are still in a cache then; elsewhere all."""
_WIDENED_ELEMENTS = 1 << 17
"""Weights that decoding converts to fp32 at one time."""
_CHUNK_TOKENS = 64
"""Chunks have a multiple of so many tokens: these are rows of matrix products, and fill whole tiles of them. Fewer
also make products slow, and every chunk adds to the whole gradient."""


class HeadLoss(NamedTuple):
    """Sums over tokens, scalars in at least fp32; only the objective has a gradient.

    Attributes:
        objective: what is minimised, the sum of the other two.
        cross_entropy: -log softmax(logits)[target], in nats.
        z_loss: the weighted squares of log-sum-exp; 0 without weight.
    """

    objective: Tensor
    cross_entropy: Tensor
    z_loss: Tensor


def logits(x_BSD: Tensor, embedding_VD: Tensor) -> Tensor:
    """Logits [B, S, V] of the normed hidden states, in at least fp32."""
    x_TD = x_BSD.flatten(0, -2)
    if not torch.compiler.is_compiling() and keeps_narrow(x_TD, embedding_VD.T):
        logits_TV: Tensor = _Logits.apply(x_TD, embedding_VD)
        return logits_TV.unflatten(0, x_BSD.shape[:-1])
    x_BSD = at_least_fp32(x_BSD)
    if embedding_VD.dtype == x_BSD.dtype or x_BSD.requires_grad or embedding_VD.device.type != "cpu":
        return F.linear(x_BSD, at_least_fp32(embedding_VD))
    # A few rows at a time are widened in the cache; all of them would go through memory.
    chunks = embedding_VD.split(max(1, _WIDENED_ELEMENTS // embedding_VD.shape[1]))
    return torch.cat([F.linear(x_BSD, at_least_fp32(chunk)) for chunk in chunks], dim=-1)


def summed_losses(
    x_TD: Tensor,
    embedding_VD: Tensor,
    targets_T: Tensor,
    *,
    z_weight: float = 0.0,
    chunk_tokens: int | None = None,
    add_gradient: Callable[[Tensor], None] | None = None,
) -> HeadLoss:
    """Return the loss of the head, and what it is made of.

    Args:
        x_TD: normed hidden states.
        embedding_VD: tied embedding.
        targets_T: int64 classes; positions of IGNORED_TARGET add nothing.
        z_weight: weight of the squared log-sum-exp.
        chunk_tokens: tokens whose logits exist at one time; chosen by the device and the vocabulary if None.
        add_gradient: takes the embedding's gradient from the head, [V, D] in at least fp32, in backward. Autograd
            then gets none of it, and would round it to the embedding's format.
    """
    chunk = chunk_tokens or default_chunk(x_TD.device.type, embedding_VD.shape[0])
    wants_gradient = torch.is_grad_enabled() and (x_TD.requires_grad or embedding_VD.requires_grad)
    return HeadLoss(
        *_SummedLosses.apply(x_TD, embedding_VD, targets_T, z_weight, chunk, wants_gradient, add_gradient)
    )


def default_chunk(device_type: str, vocabulary: int) -> int:
    """Return the tokens of a chunk: the multiple of 64 whose logits are nearest to what the device is given.

    Rounding down would make 18 chunks of 16,384 tokens with a vocabulary of 262,272, the last of 64 tokens.
    These are 16 equal ones of 1,024, which take 0.05 % more than the 1 GiB.
    """
    elements = _CHUNK_ELEMENTS.get(device_type, _CHUNK_ELEMENTS_ELSEWHERE)
    return max(1, round(elements / vocabulary / _CHUNK_TOKENS)) * _CHUNK_TOKENS


class _Logits(torch.autograd.Function):
    """fp32 logits of narrow operands, which are nowhere widened; gradients in the operands' format."""

    @staticmethod
    def forward(ctx: Any, x_TD: Tensor, embedding_VD: Tensor) -> Tensor:
        ctx.save_for_backward(x_TD, embedding_VD)
        return _wide_product(x_TD, embedding_VD.T)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_TV: Tensor) -> tuple[Tensor | None, Tensor | None]:
        x_TD, embedding_VD = ctx.saved_tensors
        narrow_TV = grad_TV.to(x_TD.dtype)
        wants_gradient = ctx.needs_input_grad
        return (
            narrow_TV @ embedding_VD if wants_gradient[0] else None,
            narrow_TV.T @ x_TD if wants_gradient[1] else None,
        )


def _wide_product(left_MK: Tensor, right_KN: Tensor) -> Tensor:
    wide = torch.promote_types(left_MK.dtype, torch.float32)
    out_MN = left_MK.new_empty(left_MK.shape[0], right_KN.shape[1], dtype=wide)
    product(left_MK, right_KN, out_MN)
    return out_MN


def _softmax(x_TD: Tensor, weight_VD: Tensor, target_T1: Tensor, out_TV: Tensor) -> tuple[Tensor, Tensor]:
    """Write the softmax of the logits; return their log-sum-exp and the target's logit, both [T, 1]."""
    on_cpu = x_TD.device.type == "cpu"
    rows = max(_CHUNK_TOKENS, _PART_ELEMENTS_ON_CPU // len(weight_VD)) if on_cpu else max(1, len(x_TD))
    log_sums, target_logits = [], []
    for x, target, softmax in zip(x_TD.split(rows), target_T1.split(rows), out_TV.split(rows), strict=True):
        logits = x @ weight_VD.T
        torch.softmax(logits, dim=-1, out=softmax)
        # The largest probability is exp(largest logit) / sum of exponentials, and never small.
        log_sums.append(logits.amax(dim=-1, keepdim=True) - softmax.amax(dim=-1, keepdim=True).log())
        target_logits.append(logits.gather(-1, target))
        del logits  # before the next ones are made
    return torch.cat(log_sums), torch.cat(target_logits)


def _product_into(left_MK: Tensor, right_KN: Tensor, out_MN: Tensor) -> None:
    """Write left @ right into a matrix of at least its format."""
    if left_MK.dtype == out_MN.dtype:
        torch.mm(left_MK, right_KN, out=out_MN)
    else:
        out_MN.copy_(left_MK @ right_KN)


def _add_product(left_MK: Tensor, right_KN: Tensor, total_MN: Tensor) -> None:
    """Add left @ right to a matrix of at least its format."""
    if left_MK.dtype == total_MN.dtype:
        total_MN.addmm_(left_MK, right_KN)
    else:
        total_MN += left_MK @ right_KN


class _Sums(NamedTuple):
    """Sums over the tokens that count, and gradients of the objective; no gradients if none are wanted."""

    cross_entropy: Tensor
    z_loss: Tensor
    grad_x_TD: Tensor | None
    grad_weight_VD: Tensor | None

    @classmethod
    def empty(cls, x_TD: Tensor, embedding_VD: Tensor, *, wanted: bool) -> _Sums:
        """Return sums of zero, and memory for the gradients."""
        wide = torch.promote_types(embedding_VD.dtype, torch.float32)
        grad_x_TD = torch.empty_like(x_TD) if wanted else None
        grad_weight_VD = torch.empty_like(embedding_VD, dtype=wide) if wanted else None
        return cls(x_TD.new_zeros((), dtype=wide), x_TD.new_zeros((), dtype=wide), grad_x_TD, grad_weight_VD)


def _sum_narrow(
    x_TD: Tensor, embedding_VD: Tensor, targets_T: Tensor, z_weight: float, chunk: int, *, wanted: bool
) -> _Sums:
    """Multiply 16-bit operands as they are; one kernel turns their logits into losses and gradient, in place."""
    counted_T = targets_T != IGNORED_TARGET
    target_T = targets_T.where(counted_T, 0)
    sums = _Sums.empty(x_TD, embedding_VD, wanted=wanted)
    logits_TV = x_TD.new_empty(chunk, len(embedding_VD), dtype=torch.float32)
    for start in range(0, len(x_TD), chunk):
        rows = slice(start, start + chunk)
        x, counted = x_TD[rows], counted_T[rows]
        logits = logits_TV[: len(x)]
        product(x, embedding_VD.T, logits)
        log_sum, target_logit, gradient = losses(logits, target_T[rows], counted, z_weight, embedding_VD.dtype)
        sums.cross_entropy.add_((log_sum - target_logit).where(counted, 0).sum())
        sums.z_loss.add_(z_weight * log_sum.square().where(counted, 0).sum())
        if sums.grad_x_TD is not None and sums.grad_weight_VD is not None:
            torch.mm(gradient, embedding_VD, out=sums.grad_x_TD[rows])
            (add_product if start else product)(gradient.T, x, sums.grad_weight_VD)
    return sums


def _sum_wide(
    x_TD: Tensor, embedding_VD: Tensor, targets_T: Tensor, z_weight: float, chunk: int, *, wanted: bool
) -> _Sums:
    """Multiply operands in at least fp32; on CPUs logits exist for a few tokens at a time."""
    weight_VD = at_least_fp32(embedding_VD)
    counted_T1 = (targets_T != IGNORED_TARGET).unsqueeze(-1)
    target_T1 = targets_T.unsqueeze(-1).where(counted_T1, 0)
    counted_x_TD = x_TD * counted_T1 if wanted else x_TD
    sums = _Sums.empty(x_TD, embedding_VD, wanted=wanted)
    softmax_TV = x_TD.new_empty(chunk, len(weight_VD), dtype=weight_VD.dtype)
    for start in range(0, len(x_TD), chunk):
        rows = slice(start, start + chunk)
        x, target, counted = x_TD[rows], target_T1[rows], counted_T1[rows]
        softmax = softmax_TV[: len(x)]
        log_sum, target_logit = _softmax(at_least_fp32(x), weight_VD, target, softmax)
        sums.cross_entropy.add_((log_sum - target_logit).where(counted, 0).sum())
        if z_weight:
            sums.z_loss.add_(z_weight * log_sum.square().where(counted, 0).sum())
            softmax.mul_(1 + 2 * z_weight * log_sum)
        if sums.grad_x_TD is not None and sums.grad_weight_VD is not None:
            grad_logits = softmax.scatter_add_(-1, target, -torch.ones_like(log_sum))
            rounded = grad_logits.to(embedding_VD.dtype)
            torch.mm(rounded, embedding_VD, out=sums.grad_x_TD[rows])
            (_add_product if start else _product_into)(rounded.T, counted_x_TD[rows], sums.grad_weight_VD)
    if sums.grad_x_TD is not None:
        sums.grad_x_TD.mul_(counted_T1)
    return sums


class _SummedLosses(torch.autograd.Function):
    """Gradient of the logits is (1 + 2 weight Z) softmax - onehot; taken in forward, only scaled in backward."""

    @staticmethod
    def forward(
        ctx: Any,
        x_TD: Tensor,
        embedding_VD: Tensor,
        targets_T: Tensor,
        z_weight: float,
        chunk: int,
        wanted: bool,
        add_gradient: Callable[[Tensor], None] | None,
    ) -> tuple[Tensor, Tensor, Tensor]:
        run = _sum_narrow if keeps_narrow(x_TD, embedding_VD.T) else _sum_wide
        chunk = max(1, min(chunk, len(x_TD)))
        sums = run(x_TD, embedding_VD, targets_T, z_weight, chunk, wanted=wanted)
        if wanted:
            ctx.save_for_backward(sums.grad_x_TD, sums.grad_weight_VD)
        ctx.add_gradient = add_gradient
        ctx.mark_non_differentiable(sums.cross_entropy, sums.z_loss)
        return sums.cross_entropy + sums.z_loss, sums.cross_entropy, sums.z_loss

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_loss: Tensor, *_: Tensor) -> tuple[Tensor | None, ...]:
        grad_x_TD, grad_weight_VD = ctx.saved_tensors
        grad_x_TD.mul_(grad_loss)
        grad_weight_VD.mul_(grad_loss)
        if ctx.add_gradient is None:
            return grad_x_TD, grad_weight_VD, None, None, None, None, None
        ctx.add_gradient(grad_weight_VD)
        return grad_x_TD, None, None, None, None, None, None
