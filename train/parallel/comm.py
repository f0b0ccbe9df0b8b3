"""The collectives that sharding needs, over one group of ranks, with a count of what they send.

Counted are the bytes that one rank sends under the best known algorithm for n bytes on N ranks, whatever the
backend makes of it:

    reduce_scatter   n of input    n (N-1)/N          all_to_all   what goes to other ranks
    all_gather       n of output   n (N-1)/N          all_reduce   2 n (N-1)/N

NCCL and RCCL reach these with rings. gloo does an all-reduce's work for a reduce-scatter, twice these bytes: on
CPUs the count is what GPUs would send. They are counted by operation, and by what they travel over: a ring sends
all of it to the next rank of the group, which for the last rank of a node is on another node and another rail.

Every call takes tensors that the caller keeps: nothing is allocated here. `reduce_scatter` and `all_gather` return
a handle, and the tensors may not be touched until its `wait()`; the collective is then in order with the caller's
stream. All ranks must make the same calls in the same order. On one rank nothing is sent and results are copied
if they are not in place already; if there are no elements, nothing is done.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Protocol

import torch.distributed as dist
from torch import Tensor

from zslurm.train.parallel.levels import Levels
from zslurm.train.parallel.route import Level
from zslurm.train.parallel.topology import Path, Topology

# torch 2.13 renamed both collectives.
reduce_scatter_into = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
all_gather_into = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


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
        rank, size: this rank's number in the group, and how many there are.
        position: the number of this rank's chunk in what is divided into `size` chunks; here its rank.
        sent: bytes that this rank sent, by operation, since the counter was last cleared.
        travelled: the same bytes by what they travelled over.
    """

    def __init__(
        self, group: dist.ProcessGroup, topology: Topology | None = None, members: Sequence[int] | None = None
    ) -> None:
        """Take a group of the ranks `members` of a topology; by default of all ranks, all of them on one node."""
        self.group = group
        self.rank, self.size = dist.get_rank(group), dist.get_world_size(group)
        self.position = self.rank
        self.topology = topology or Topology(1, self.size)
        self.members = range(self.size) if members is None else members
        self.sent: Counter[str] = Counter()
        self.travelled: Counter[Path] = Counter()

    def reserve(self, room: Tensor) -> None:
        """Take a buffer for what is between two levels (two_level.py); one level needs none."""

    def regroup(self, group: dist.ProcessGroup, levels: Levels | None) -> None:
        """Continue over a new group of as many ranks, this one at the same place; `levels` are two_level.py's."""
        self.group = group

    def reduce_scatter(self, out: Tensor, whole: Tensor) -> Handle:
        """Sum `whole` over all ranks; `out` is this position's of `size` equal chunks. `whole` is kept."""
        if self.size == 1 or not whole.numel():
            return _copied(out, whole)
        self.count_ring("reduce_scatter", whole)
        handle: Handle = reduce_scatter_into(out, whole, group=self.group, async_op=True)
        return handle

    def all_gather(self, whole: Tensor, part: Tensor) -> Handle:
        """Fill `whole` with every position's `part`, in order; `part` may be its own view of `whole`."""
        if self.size == 1 or not whole.numel():
            return _copied(whole, part)
        self.count_ring("all_gather", whole)
        handle: Handle = all_gather_into(whole, part, group=self.group, async_op=True)
        return handle

    def all_to_all(
        self,
        out: Tensor,
        out_splits: list[int],
        source: Tensor,
        source_splits: list[int],
        level: Level = Level.ALL,
    ) -> None:
        """Send source_splits[r] elements of `source`, in order, to each rank r; fill `out` with what they send.

        Any of the numbers may be 0. With two levels, the ranks are the `level`'s.
        """
        assert level is Level.ALL, f"there is no {level} level in flat collectives"
        if self.size == 1:
            _copied(out, source)
            return
        self.count_pairs("all_to_all", source_splits, source.element_size())
        dist.all_to_all_single(out, source, out_splits, source_splits, group=self.group)

    def all_reduce(self, values: Tensor, op: dist.ReduceOp.RedOpType = dist.ReduceOp.SUM) -> None:
        """Replace `values` by their sum (or another `op`) over all ranks; the same bits on all of them."""
        if self.size > 1:
            self.count_ring("all_reduce", values, times=2)
            dist.all_reduce(values, op=op, group=self.group)

    def count_ring(self, operation: str, whole: Tensor, times: int = 1) -> None:
        """Count what this rank sends to the next one of a ring, `times` round."""
        sent = round(times * _bytes(whole) * (self.size - 1) / self.size)
        self._count(operation, (self.rank + 1) % self.size, sent)

    def count_pairs(self, operation: str, splits: Sequence[int], itemsize: int) -> None:
        """Count what this rank sends to each other one."""
        for receiver, elements in enumerate(splits):
            if receiver != self.rank and elements:
                self._count(operation, receiver, elements * itemsize)

    def _count(self, operation: str, receiver: int, sent: int) -> None:
        self.sent[operation] += sent
        self.travelled[self.topology.path(self.members[self.rank], self.members[receiver])] += sent


def _bytes(values: Tensor) -> int:
    return values.numel() * values.element_size()


def _copied(out: Tensor, source: Tensor) -> Handle:
    if out.data_ptr() != source.data_ptr():
        out.copy_(source)
    return DONE
