"""The collectives that sharding needs, over one group of ranks, with a count of what they send.

Counted are the bytes that one rank sends under the best known algorithm for n bytes on N ranks, whatever the
backend makes of it:

    reduce_scatter   n of input    n (N-1)/N          all_to_all   what goes to other ranks
    all_gather       n of output   n (N-1)/N          all_reduce   2 n (N-1)/N

NCCL and RCCL reach these with rings. gloo does an all-reduce's work for a reduce-scatter, twice these bytes: on
CPUs the count is what GPUs would send.

Every call takes tensors that the caller keeps: nothing is allocated here. `reduce_scatter` and `all_gather` return
a handle, and the tensors may not be touched until its `wait()`; the collective is then in order with the caller's
stream. All ranks must make the same calls in the same order. On one rank nothing is sent and results are copied
where they are not in place already; where there are no elements, nothing is done.
"""

from __future__ import annotations

from collections import Counter
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

    def reduce_scatter(self, out: Tensor, whole: Tensor) -> Handle:
        """Sum `whole` over all ranks; `out` is this rank's of `size` equal chunks of the sum. `whole` is kept."""
        if self.size == 1 or not whole.numel():
            return _copied(out, whole)
        self._count("reduce_scatter", _bytes(whole) * (self.size - 1) / self.size)
        handle: Handle = _reduce_scatter(out, whole, group=self.group, async_op=True)
        return handle

    def all_gather(self, whole: Tensor, part: Tensor) -> Handle:
        """Fill `whole` with every rank's `part`, one after the other; `part` may be its own view of `whole`."""
        if self.size == 1 or not whole.numel():
            return _copied(whole, part)
        self._count("all_gather", _bytes(whole) * (self.size - 1) / self.size)
        handle: Handle = _all_gather(whole, part, group=self.group, async_op=True)
        return handle

    def all_to_all(self, out: Tensor, out_splits: list[int], source: Tensor, source_splits: list[int]) -> None:
        """Send source_splits[r] elements of `source`, in order, to each rank r; fill `out` with what they send.

        Any of the numbers may be 0.
        """
        if self.size == 1:
            _copied(out, source)
            return
        away = sum(source_splits) - source_splits[self.rank]
        self._count("all_to_all", away * source.element_size())
        dist.all_to_all_single(out, source, out_splits, source_splits, group=self.group)

    def all_reduce(self, values: Tensor, op: dist.ReduceOp.RedOpType = dist.ReduceOp.SUM) -> None:
        """Replace `values` by their sum (or another `op`) over all ranks."""
        if self.size > 1:
            self._count("all_reduce", 2 * _bytes(values) * (self.size - 1) / self.size)
            dist.all_reduce(values, op=op, group=self.group)

    def _count(self, operation: str, sent: float) -> None:
        self.sent[operation] += round(sent)


def _bytes(values: Tensor) -> int:
    return values.numel() * values.element_size()


def _copied(out: Tensor, source: Tensor) -> Handle:
    if out.data_ptr() != source.data_ptr():
        out.copy_(source)
    return DONE
