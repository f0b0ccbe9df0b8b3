"""The collectives that sharding needs, over one group of ranks, with a count of what they send.

Counted are the bytes that one rank sends under the best known algorithm for n bytes on N ranks, whatever the
backend makes of it:

    reduce_scatter   n of input    n (N-1)/N          all_to_all   what goes to other ranks
    all_gather       n of output   n (N-1)/N          all_reduce   2 n (N-1)/N

NCCL and RCCL reach these with rings. gloo has no reduce-scatter of its own and does an all-reduce's work for it,
twice these bytes: on CPUs the count says what GPUs would send.

Every call takes tensors that the caller keeps: nothing is allocated here. `async_op=True` returns a handle, and
the tensors may not be touched until its `wait()`; what the call does is then in order with the caller's stream.
All ranks must make the same calls in the same order. On one rank nothing is sent and results are copied where they
do not lie there already; where there are no elements, nothing is done.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Protocol

import torch.distributed as dist
from torch import Tensor

# torch 2.13 renamed both collectives.
_reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


class Handle(Protocol):
    """A collective under way."""

    def wait(self) -> object:
        """Return when it is done; on a GPU, when the current stream will wait for it."""


class _Done:
    """Nothing is under way."""

    def wait(self) -> None: ...


DONE: Handle = _Done()


class Comm:
    """Collectives over a group.

    Attributes:
        sent: bytes that this rank sent, by operation, since the counter was last cleared.
    """

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.group = group
        self.rank, self.size = dist.get_rank(group), dist.get_world_size(group)
        self.sent: Counter[str] = Counter()

    def reduce_scatter(self, out: Tensor, whole: Tensor, *, async_op: bool = False) -> Handle:
        """Sum `whole` over all ranks; `out` is this rank's of `size` equal chunks of the sum. `whole` is kept."""
        if self.size == 1 or not whole.numel():
            return _copied(out, whole)
        self._count("reduce_scatter", _bytes(whole) * (self.size - 1) / self.size)
        return _reduce_scatter(out, whole, group=self.group, async_op=async_op) or DONE

    def all_gather(self, whole: Tensor, part: Tensor, *, async_op: bool = False) -> Handle:
        """Fill `whole` with every rank's `part`, one behind the other; `part` may be its own place in `whole`."""
        if self.size == 1 or not whole.numel():
            return _copied(whole, part)
        self._count("all_gather", _bytes(whole) * (self.size - 1) / self.size)
        return _all_gather(whole, part, group=self.group, async_op=async_op) or DONE

    def all_to_all(
        self,
        out: Tensor,
        out_splits: Sequence[int],
        source: Tensor,
        source_splits: Sequence[int],
        *,
        async_op: bool = False,
    ) -> Handle:
        """Send source_splits[r] elements of `source`, in order, to each rank r; fill `out` with what they send.

        Any of the numbers may be 0.
        """
        if self.size == 1:
            return _copied(out, source)
        away = sum(source_splits) - source_splits[self.rank]
        self._count("all_to_all", away * source.element_size())
        handle = dist.all_to_all_single(
            out, source, list(out_splits), list(source_splits), group=self.group, async_op=async_op
        )
        return handle or DONE

    def all_reduce(
        self, values: Tensor, op: dist.ReduceOp.RedOpType = dist.ReduceOp.SUM, *, async_op: bool = False
    ) -> Handle:
        """Replace `values` by their sum (or another `op`) over all ranks."""
        if self.size == 1:
            return DONE
        self._count("all_reduce", 2 * _bytes(values) * (self.size - 1) / self.size)
        return dist.all_reduce(values, op=op, group=self.group, async_op=async_op) or DONE

    def _count(self, operation: str, sent: float) -> None:
        self.sent[operation] += round(sent)


def _bytes(values: Tensor) -> int:
    return values.numel() * values.element_size()


def _copied(out: Tensor, source: Tensor) -> Handle:
    if out.data_ptr() != source.data_ptr():
        out.copy_(source)
    return DONE
