"""Pieces of matrices on their way between those who hold them and those who own them: one all-to-all each way.

    to_owners    reduced gradients: every rank sends what it holds, packed by owner, and gets what it owns
    to_holders   updated weights, the same way back

What each rank sends and gets is known from the plan (buckets.py). A rank sends what it holds, 1/N of the matrices,
and gets what it owns, about as much: 2 P/N elements for both ways, on top of the reduction and the gathering.

Memory: two buffers of 1/N of the matrices each, allocated once: one of what is held, packed, and one of what is
owned, packed; they swap roles on the way back. Before it is packed, the second one holds what this rank holds of
the reduced gradients: the way to the owners is from there to the first, and back into it. Packing copies one
piece after the other (in fused kernels on a GPU), and converts formats on the way if need be. On one rank pieces
are copied to where they belong, and there are no buffers.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from zslurm.train.parallel.buckets import MatrixSpace
from zslurm.train.parallel.comm import Comm
from zslurm.train.parallel.memory import exchange_bytes


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
    ) -> None:
        """Plan the exchange and allocate its buffers; `gradients` travel to owners, `weights` back."""
        self.comm, self._gradients, self._weights = comm, gradients, weights
        self.held, self.owned = space.held_by(comm.rank), space.owned_by(comm.rank)
        self._to = _counts(((piece.owner, piece.numel) for piece in self.held), comm.size)
        self._from = _counts(((piece.holder, piece.numel) for piece in self.owned), comm.size)
        bytes_held, bytes_owned = exchange_bytes(space, comm.rank, gradients.itemsize, weights.itemsize)
        self._packed_held = torch.empty(bytes_held, dtype=torch.uint8, device=device)
        self._packed_owned = torch.empty(bytes_owned, dtype=torch.uint8, device=device)
        share = 0 if comm.size == 1 else space.share
        self.share = _as(self._packed_owned, share, gradients)

    def to_owners(self, held: list[Tensor], owned: list[Tensor]) -> None:
        """Fill the `owned` gradients of every rank with the `held` ones of all."""
        if self.comm.size == 1:
            _copy(owned, held)
            return
        outgoing = _as(self._packed_held, sum(self._to), self._gradients)
        incoming = _as(self._packed_owned, sum(self._from), self._gradients)
        _copy(_cut(outgoing, held), held)
        self.comm.all_to_all(incoming, self._from, outgoing, self._to)
        _copy(owned, _cut(incoming, owned))

    def to_holders(self, owned: list[Tensor], held: list[Tensor]) -> None:
        """Fill the `held` weights of every rank with the `owned` ones of all."""
        if self.comm.size == 1:
            _copy(held, owned)
            return
        outgoing = _as(self._packed_owned, sum(self._from), self._weights)
        incoming = _as(self._packed_held, sum(self._to), self._weights)
        _copy(_cut(outgoing, owned), owned)
        self.comm.all_to_all(incoming, self._to, outgoing, self._from)
        _copy(held, _cut(incoming, held))


def _counts(pieces: Iterable[tuple[int, int]], size: int) -> list[int]:
    """Return the elements for each rank."""
    counts = [0] * size
    for rank, numel in pieces:
        counts[rank] += numel
    return counts


def _as(buffer: Tensor, numel: int, dtype: torch.dtype) -> Tensor:
    return buffer[: numel * dtype.itemsize].view(dtype)


def _cut(packed: Tensor, pieces: list[Tensor]) -> list[Tensor]:
    """Views of `packed`, one as long as each of the pieces."""
    return list(packed.split([piece.numel() for piece in pieces]))


def _copy(targets: list[Tensor], sources: list[Tensor]) -> None:
    if targets:  # torch refuses a call without tensors
        torch._foreach_copy_(targets, sources)
