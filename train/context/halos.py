"""Halos: the tokens before a chunk that its first ones are made of.

Two things look back a few tokens: the convolutions of queries and keys (at the projections before them), and the
delayed value (at one projection). Of each chunk the last of them go to the rank that holds the next chunk, all in
one exchange per layer. Those of chunk i, on rank i, go to rank i + 1, those of chunk 2c - 1 - i to rank i - 1:
neighbours in a chain. The middle of the sequence, between chunks c - 1 and c, is inside the last rank; before the
first chunk are zeros.

The backward pass sends the gradients of halos back to their owners.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from zslurm.checkpoint_tools.quantities import counted
from zslurm.train.context.context_parallel import ContextParallel


def exchange_halos(
    context: ContextParallel, z_BSQ: Tensor, delayed_BSV: Tensor, reach: int
) -> tuple[Tensor, Tensor]:
    """Return what comes before each of this rank's two chunks.

    Args:
        context: the ranks that share the sequences.
        z_BSQ: this rank's queries and keys before the convolutions; S is both chunks.
        delayed_BSV: its values for the token after each.
        reach: tokens that the convolutions look back, at most a chunk's.

    Returns:
        the `reach` tokens of z before each chunk [B, 2, reach, Q], and the delayed value [B, 2, 1, V].
    """
    chunk = z_BSQ.shape[1] // 2
    if reach > chunk:
        raise ValueError(
            f"halos: a chunk of {counted(chunk, 'token')} is shorter than the {reach} that convolutions look back"
        )
    z_B2CQ, delayed_B2CV = (x.unflatten(1, (2, chunk)) for x in (z_BSQ, delayed_BSV))
    ends = (z_B2CQ[:, :, chunk - reach :], delayed_B2CV[:, :, -1:])
    if context.size == 1:
        before = [torch.stack([torch.zeros_like(end[:, 0]), end[:, 0]], dim=1) for end in ends]
    else:
        ends_2N = torch.cat([end.transpose(0, 1).flatten(1) for end in ends], dim=1)
        before_2N: Tensor = _Exchange.apply(ends_2N, context)
        parts = before_2N.split([end[:, 0].numel() for end in ends], dim=1)
        shapes = [(2, len(end), *end.shape[2:]) for end in ends]
        before = [part.view(shape).transpose(0, 1) for part, shape in zip(parts, shapes, strict=True)]
    return before[0], before[1]


def put_before(before_B2WX: Tensor, x_BSX: Tensor) -> Tensor:
    """Put each chunk behind the tokens before it: [B, 2 (W + C), X]."""
    return torch.cat([before_B2WX, x_BSX.unflatten(1, (2, -1))], dim=2).flatten(1, 2)


def without_halos(x: Tensor, halo: int, *, dim: int) -> Tensor:
    """Drop the tokens before each of two chunks."""
    if not halo:
        return x
    size = x.shape[dim] // 2
    return torch.cat([part.narrow(dim, halo, size - halo) for part in x.split(size, dim)], dim)


def previous_tokens(before_B21X: Tensor, x_BSX: Tensor) -> Tensor:
    """Return for each token the one before it."""
    return torch.cat([before_B21X, x_BSX.unflatten(1, (2, -1))[:, :, :-1]], dim=2).flatten(1, 2)


class _Exchange(torch.autograd.Function):
    """From the ends of both chunks to what is before both."""

    @staticmethod
    def forward(ctx: Any, ends_2N: Tensor, context: ContextParallel) -> Tensor:
        ctx.context = context
        # The end of the early chunk comes before the next rank's early one.
        return _swap(context, ends_2N, to_previous=1, to_next=0)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_2N: Tensor) -> tuple[Tensor, None]:
        return _swap(ctx.context, grad_2N, to_previous=0, to_next=1), None


def _swap(context: ContextParallel, rows_2N: Tensor, *, to_previous: int, to_next: int) -> Tensor:
    """Send a row to each neighbour; the row that a rank sends on one side comes from its other side."""
    first, last = context.rank == 0, context.rank == context.size - 1
    from_previous, from_next = context.swap_with_neighbours(
        None if first else rows_2N[to_previous], None if last else rows_2N[to_next]
    )
    out_2N = torch.zeros_like(rows_2N)
    if from_previous is not None:
        out_2N[to_next] = from_previous
    out_2N[to_previous] = rows_2N[to_next] if from_next is None else from_next  # the middle of the sequence
    return out_2N


def last_tokens(context: ContextParallel, x_BSQ: Tensor, length: int, count: int) -> Tensor:
    """Return the last `count` of the `length` tokens of whole sequences on every rank, [B, count, Q].

    It has no gradient: it is for decoding.
    """
    first = length - count
    position_S = context.positions(length)
    here_N = ((position_S >= first) & (position_S < length)).nonzero().squeeze(1)
    last_BWQ = x_BSQ.new_zeros(x_BSQ.shape[0], count, x_BSQ.shape[2])
    if count:
        last_BWQ[:, position_S[here_N] - first] = x_BSQ[:, here_N]
        dist.all_reduce(last_BWQ, group=context.group)
    return last_BWQ
