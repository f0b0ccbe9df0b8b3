"""Pieces of matrices on their way between those who hold them and those who own them, in one all-to-all or two.

    to_owners    reduced gradients: every rank sends what it holds, packed by owner, and gets what it owns
    to_holders   updated weights, the same way back

What each rank sends and gets is known from the plan (route.py). A rank sends what it holds, 1/N of the matrices,
and gets what it owns, about as much: 2 P/N elements for both ways, on top of the reduction and the gathering. With
two levels it also passes on as much, inside its node.

Memory: two buffers of 1/N of the matrices each, allocated once: one of what is held, packed, and one of what is
owned, packed; they swap roles on the way back. Before it is packed, the second one holds what this rank holds of
the reduced gradients: the way to the owners is from there to the first, and back into it. Between the two ways it
is free, so that the optimizer can write the weights there as they are packed. What a rank passes on arrives in the
second and leaves from the first, and the other way on the way back: a second hop takes no memory unless a rank
passes on more than it holds or owns. Packing copies one piece after the other (in fused kernels on a GPU), and
converts formats on the way if need be. On one rank pieces are copied to their destinations; there are no buffers.
"""

from __future__ import annotations

from itertools import chain

import torch
from torch import Tensor

from zslurm.train.parallel.buckets import MatrixSpace
from zslurm.train.parallel.comm import Comm
from zslurm.train.parallel.memory import exchange_bytes
from zslurm.train.parallel.route import plan_route
from zslurm.train.parallel.topology import Topology


class Exchange:
    """Both ways between the holders and the owners of matrices.

    Attributes:
        held: the pieces that this rank holds, in the order in which `to_owners` wants them.
        owned: the pieces that this rank owns, likewise.
        share: room for the gradients that this rank holds, not packed; no longer theirs after `to_owners`.
    """

    def __init__(
        self,
        space: MatrixSpace,
        comm: Comm,
        device: torch.device,
        *,
        gradients: torch.dtype,
        weights: torch.dtype,
        topology: Topology | None = None,
    ) -> None:
        """Plan the exchange and allocate its buffers; `gradients` travel to owners, `weights` back.

        With a `topology` it takes two hops, over the levels of `comm`.
        """
        self.comm, self._gradients, self._weights = comm, gradients, weights
        self._route = plan_route(space, comm.position, topology)
        self.held, self.owned = self._route.held, self._route.owned
        bytes_held, bytes_owned = exchange_bytes(space, self._route, gradients.itemsize, weights.itemsize)
        self._packed_held = torch.empty(bytes_held, dtype=torch.uint8, device=device)
        self._packed_owned = torch.empty(bytes_owned, dtype=torch.uint8, device=device)
        share = 0 if comm.size == 1 else space.share
        self.share = _as(self._packed_owned, share, gradients)

    def to_owners(self, held: list[Tensor], owned: list[Tensor]) -> None:
        """Fill the `owned` gradients of every rank with the `held` ones of all."""
        if self.comm.size == 1:
            _copy(owned, held)
            return
        source, target = self._packed_held, self._packed_owned
        first, last = self._route.hops[0], self._route.hops[-1]
        outgoing = _as(source, sum(first.sends), self._gradients)
        incoming = _as(target, sum(last.receives), self._gradients)
        _copy(_cut(outgoing, held), held)
        if first is not last:
            arrived = _as(target, self._route.passed_on, self._gradients)
            self.comm.all_to_all(arrived, first.receives, outgoing, first.sends, first.level)
            outgoing = _as(source, self._route.passed_on, self._gradients)
            by_holder, by_owner = self._passing(arrived, outgoing)
            _copy(by_owner, by_holder)
        self.comm.all_to_all(incoming, last.receives, outgoing, last.sends, last.level)
        _copy(owned, _cut(incoming, owned))

    def weights_to_send(self) -> list[Tensor]:
        """Return the buffers of the `owned` weights: free to be written after `to_owners`."""
        outgoing = _as(self._packed_owned, sum(piece.numel for piece in self.owned), self._weights)
        return list(outgoing.split([piece.numel for piece in self.owned]))

    def to_holders(self, owned: list[Tensor], held: list[Tensor], *, packed: bool = False) -> None:
        """Fill the `held` weights of every rank with the `owned` ones of all.

        With `packed` this rank's weights are in `weights_to_send` already.
        """
        if self.comm.size == 1:
            _copy(held, owned)
            return
        source, target = self._packed_owned, self._packed_held
        first, last = self._route.hops[-1], self._route.hops[0]
        outgoing = _as(source, sum(first.receives), self._weights)
        incoming = _as(target, sum(last.sends), self._weights)
        if not packed:
            _copy(_cut(outgoing, owned), owned)
        if first is not last:
            arrived = _as(target, self._route.passed_on, self._weights)
            self.comm.all_to_all(arrived, first.sends, outgoing, first.receives, first.level)
            outgoing = _as(source, self._route.passed_on, self._weights)
            by_holder, by_owner = self._passing(outgoing, arrived)
            _copy(by_holder, by_owner)
        self.comm.all_to_all(incoming, last.sends, outgoing, last.receives, last.level)
        _copy(held, _cut(incoming, held))

    def _passing(self, by_holder: Tensor, by_owner: Tensor) -> tuple[list[Tensor], list[Tensor]]:
        """Cut what this rank passes on, in the order of the node's ranks and in the order of the nodes."""
        through = self._route.through
        nodes = range(len(through[0]))
        holders = by_holder.split([*chain.from_iterable(through)])
        owners = by_owner.split([counts[node] for node in nodes for counts in through])
        return (
            [holders[rank * len(nodes) + node] for node in nodes for rank in range(len(through))],
            list(owners),
        )


def _as(buffer: Tensor, numel: int, dtype: torch.dtype) -> Tensor:
    return buffer[: numel * dtype.itemsize].view(dtype)


def _cut(packed: Tensor, pieces: list[Tensor]) -> list[Tensor]:
    """Return views of `packed`, one as long as each of the pieces."""
    return list(packed.split([piece.numel() for piece in pieces]))


def _copy(targets: list[Tensor], sources: list[Tensor]) -> None:
    if targets:  # torch refuses a call without tensors
        torch._foreach_copy_(targets, sources)
