"""Collectives in two levels: inside each node, over all its ranks, and along the rails, between nodes.

    reduce_scatter   node   each rank is left with the node's sum of 1/L of it: the chunks of its rail
                     rail   and of those with its own chunk of the sum over nodes
    all_gather       rail   the chunks of the rail, straight to their place in the whole
                     node   the rails' parts, likewise
    all_to_all       the exchange calls it for each hop (route.py)
    all_reduce       node, then the first ranks of the nodes along their rail, then node: a few numbers, the same
                     bits everywhere

For n bytes on N nodes of L ranks, a rank sends n (L-1)/L inside its node and n/L (N-1)/N along its rail, as many
as in one ring over all, n (NL-1)/NL; a ring's last rank of each node sends its part to another rail, here nothing
leaves its rail between nodes. What a rank waits for are L-1 + N-1 messages one after the other instead of NL-1.

Sums are made in another order than over one group: node by node. They are bit for bit the same wherever no partial
sum is rounded; elsewhere they differ as sums over another number of ranks do.

The chunks are in the order of positions (topology.py). Both hops of a gather, and the second of a reduction, work
in place; between the hops of a reduction is a buffer that the caller reserves, of 1/L of two reductions at once.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor

from zslurm.checkpoint_tools.quantities import counted
from zslurm.train.parallel.chain import Chain
from zslurm.train.parallel.comm import DONE, Comm, Handle, all_gather_into, reduce_scatter_into
from zslurm.train.parallel.levels import Levels
from zslurm.train.parallel.route import Level

SLOTS = 2
"""Reductions that are between their hops at once: one in each hop."""


class TwoLevel(Comm):
    """Collectives over the group of all ranks, in two levels, with the interface of Comm."""

    def __init__(self, group: dist.ProcessGroup, levels: Levels, device: torch.device) -> None:
        """Take the group of all ranks, the groups of its levels, and the device that tensors are on."""
        super().__init__(group, levels.topology)
        self.position = levels.topology.position(self.rank)
        self.node = Comm(levels.node, levels.topology, levels.topology.node_ranks(self.rank))
        self.rail = Comm(levels.rail, levels.topology, levels.topology.rail_ranks(self.rank))
        for level in (self.node, self.rail):
            level.sent, level.travelled = self.sent, self.travelled
        self._device, self._chain = device, Chain(device)
        self._room = torch.empty(0, device=device)
        self._under_way = [DONE] * SLOTS  # the last reduction in each half of the room
        self._slot = 0

    def reserve(self, room: Tensor) -> None:
        """Take the buffer between the hops of reductions, which are of its format.

        A reduction needs 1/L of its elements there; if two of them fit, the first hop of one runs during the
        second hop of the other.
        """
        self._room = room

    def regroup(self, group: dist.ProcessGroup, levels: Levels | None) -> None:
        """Continue over new groups of as many ranks and nodes, this rank at the same place."""
        assert levels is not None
        super().regroup(group, levels)
        self.node.group, self.rail.group = levels.node, levels.rail
        self._chain.close()
        self._chain = Chain(self._device)
        self._under_way = [DONE] * SLOTS

    def reduce_scatter(self, out: Tensor, whole: Tensor) -> Handle:
        """Sum `whole` over all ranks; `out` is this position's of `size` equal chunks. `whole` is kept."""
        if not whole.numel():
            return DONE
        node_part, slots = self._between(len(whole) // self.node.size)
        self.node.count_ring("reduce_scatter", whole)
        self.rail.count_ring("reduce_scatter", node_part)
        handle = self._chain.run(
            *(_already(self._under_way[slot]) for slot in slots),
            lambda: reduce_scatter_into(node_part, whole, group=self.node.group, async_op=True),
            lambda: reduce_scatter_into(out, node_part, group=self.rail.group, async_op=True),
        )
        for slot in slots:
            self._under_way[slot] = handle
        return handle

    def all_gather(self, whole: Tensor, part: Tensor) -> Handle:
        """Fill `whole` with every position's `part`, in order; `part` may be its own view of `whole`."""
        if not whole.numel():
            return DONE
        on_rail = whole.chunk(self.node.size)[self.node.rank]
        self.rail.count_ring("all_gather", on_rail)
        self.node.count_ring("all_gather", whole)
        return self._chain.run(
            lambda: all_gather_into(on_rail, part, group=self.rail.group, async_op=True),
            lambda: all_gather_into(whole, on_rail, group=self.node.group, async_op=True),
        )

    def all_to_all(
        self,
        out: Tensor,
        out_splits: list[int],
        source: Tensor,
        source_splits: list[int],
        level: Level = Level.ALL,
    ) -> None:
        """Send source_splits[r] elements of `source`, in order, to each rank r of a level; see Comm.all_to_all."""
        if level is Level.ALL:
            super().all_to_all(out, out_splits, source, source_splits)
            return
        comm = self.node if level is Level.NODE else self.rail
        comm.count_pairs("all_to_all", source_splits, source.element_size())
        self._chain.run(
            lambda: dist.all_to_all_single(out, source, out_splits, source_splits, group=comm.group, async_op=True)
        ).wait()

    def all_reduce(self, values: Tensor, op: dist.ReduceOp.RedOpType = dist.ReduceOp.SUM) -> None:
        """Replace `values` by their sum (or another `op`) over all ranks; the same bits on all of them."""
        node, rail = self.node.group, self.rail.group
        first = dist.get_global_rank(node, 0)
        self.node.count_ring("all_reduce", values, times=2)
        hops = [lambda: dist.all_reduce(values, op=op, group=node, async_op=True)]
        if self.node.rank == 0:
            self.rail.count_ring("all_reduce", values, times=2)
            hops.append(lambda: dist.all_reduce(values, op=op, group=rail, async_op=True))
        # Rails might add the nodes' sums up in different orders: all ranks take the first rail's.
        hops.append(lambda: dist.broadcast(values, first, group=node, async_op=True))
        self._chain.run(*hops).wait()

    def _between(self, elements: int) -> tuple[Tensor, range]:
        """Return space for a number of elements between two hops, and the slots that it is in."""
        half = len(self._room) // SLOTS
        if elements > half:
            assert elements <= len(self._room), (
                f"there is room for {counted(len(self._room), 'element')}, of {elements}"
            )
            return self._room[:elements], range(SLOTS)
        self._slot = (self._slot + 1) % SLOTS
        return self._room[self._slot * half :][:elements], range(self._slot, self._slot + 1)


def _already(handle: Handle) -> Callable[[], Handle]:
    """Return a hop that is under way already."""
    return lambda: handle
