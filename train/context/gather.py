"""All-gather attention: every rank collects all keys and values, and computes its queries' attention at once.

The all-gather runs under the rank's own part. Two more parts follow, the keys of all ranks before it and those of
all after it: large products. Backward collects the keys again, so that between the passes only a rank's own are
kept, and sums their gradients over the ranks by a reduce-scatter, in at least fp32.

While it runs it holds the whole sequences' keys and values, about twice, and in backward their gradients.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from zslurm.train.context.context_parallel import ContextParallel
from zslurm.train.context.key_parts import KeyPart, early, own_part


class GatheredKeys:
    """See `KeyExchange`."""

    def __init__(self, context: ContextParallel, kv_2BJSP: Tensor) -> None:
        self._context = context
        self._kv_2BJSP = kv_2BJSP
        self._grad_c2BJSP: Tensor | None = None

    def parts(self) -> Iterator[KeyPart]:
        """See `KeyExchange`."""
        rank, size = self._context.rank, self._context.size
        pending = self._context.start_all_gather(self._kv_2BJSP) if size > 1 else None
        yield own_part(self._kv_2BJSP, rank)
        if pending is None:
            return
        (whole_c2BJSP,) = pending.wait()
        for ranks, is_early in ((slice(0, rank), True), (slice(rank + 1, size), False)):
            if ranks.start < ranks.stop:
                theirs_c2BJSP = whole_c2BJSP[ranks]
                joined = _join(early(theirs_c2BJSP, -2) if is_early else theirs_c2BJSP)
                yield KeyPart(joined, ranks, early_keys=is_early, late_queries=not is_early, causal=False)

    def add(self, part: KeyPart, grad_2BJSP: Tensor) -> None:
        """See `KeyExchange`."""
        if self._grad_c2BJSP is None:
            self._grad_c2BJSP = grad_2BJSP.new_zeros(self._context.size, *self._kv_2BJSP.shape)
        theirs_c2BJSP = self._grad_c2BJSP[part.ranks]
        if part.early_keys:
            theirs_c2BJSP = early(theirs_c2BJSP, -2)
        theirs_c2BJSP.copy_(grad_2BJSP.unflatten(-2, (len(theirs_c2BJSP), -1)).movedim(-3, 0))

    def gradient(self) -> Tensor:
        """See `KeyExchange`."""
        assert self._grad_c2BJSP is not None
        if self._context.size == 1:
            return self._grad_c2BJSP[0]
        return self._context.reduce_scatter(self._grad_c2BJSP)


def _join(kv_c2BJSP: Tensor) -> Tensor:
    """Lay the tokens of several ranks one after the other."""
    return torch.movedim(kv_c2BJSP, 0, -3).flatten(-3, -2)
