"""Ring attention: keys and values go round the ranks, and each computes with those that it has.

In step t rank i has those of rank i - t, and sends them on to rank i + 1 while it computes. In backward they go
round again, and their gradients follow them one step behind, in at least fp32: rank i adds its share to those
of rank i - t and sends them on under the next step. From the last rank that they visit, i - 1, they go home to
rank i. No rank holds more than two ranks' keys, but a step uses one link of each rank.
"""

from __future__ import annotations

from collections.abc import Iterator

from torch import Tensor

from zslurm.train.context.context_parallel import ContextParallel, Pending
from zslurm.train.context.key_parts import KeyPart, early, own_part


class RingOfKeys:
    """See `KeyExchange`; `backward` if gradients travel along."""

    def __init__(self, context: ContextParallel, kv_2BJSP: Tensor, *, backward: bool) -> None:
        self._context = context
        self._kv_2BJSP = kv_2BJSP
        self._backward = backward
        self._own_grad_2BJSP: Tensor | None = None
        # Of the keys of the present step: what ranks before this one have added, which may be still on its way.
        self._arriving: Pending | None = None
        self._grad_2BJSP: Tensor | None = None

    def parts(self) -> Iterator[KeyPart]:
        """See `KeyExchange`."""
        rank, size = self._context.rank, self._context.size
        kv_2BJSP, step = self._kv_2BJSP, 0
        while True:
            source = (rank - step) % size
            following = step + 1 < size
            pending = self._context.start_shift(kv_2BJSP) if following else None
            if step > 1 and self._backward:
                assert self._grad_2BJSP is not None
                self._arriving = self._context.start_shift(self._grad_2BJSP)
            if step == 0:
                yield own_part(kv_2BJSP, rank)
            else:
                is_early = source < rank
                part = early(kv_2BJSP, -2) if is_early else kv_2BJSP
                yield KeyPart(part, slice(source, source + 1), is_early, not is_early, causal=False)
            if pending is None:
                return
            (kv_2BJSP,) = pending.wait()
            step += 1

    def add(self, part: KeyPart, grad_2BJSP: Tensor) -> None:
        """See `KeyExchange`."""
        if part.causal:
            self._own_grad_2BJSP = grad_2BJSP
            return
        if self._arriving is None:
            self._grad_2BJSP = grad_2BJSP.new_zeros(self._kv_2BJSP.shape)
        else:
            (self._grad_2BJSP,) = self._arriving.wait()
        (early(self._grad_2BJSP, -2) if part.early_keys else self._grad_2BJSP).add_(grad_2BJSP)

    def gradient(self) -> Tensor:
        """See `KeyExchange`."""
        assert self._own_grad_2BJSP is not None
        if self._grad_2BJSP is None:
            return self._own_grad_2BJSP
        (home_2BJSP,) = self._context.start_shift(self._grad_2BJSP).wait()
        return self._own_grad_2BJSP.add_(home_2BJSP)
