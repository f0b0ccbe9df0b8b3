"""Whether the sums of gradients that arrived fit what was sent, by checksums that are sums as well.

Every rank adds up its gradient of each extent (the part of a tensor that one rank owns), in fp64. The sum of
these over all ranks must be the sum of what the owner received, whatever way it took: reduce-scatter of a
bucket, levels, and the exchange of matrices. The collectives round to `reduce_dtype`, each element at most once
per rank, so that on N ranks an extent may differ by N eps A, A the sum of all absolute values. A flipped bit that
changes an element by less is not found. What does not arrive, or arrives twice, is.
"""

from __future__ import annotations

import torch
from torch import Tensor

from zslurm.train.parallel.zero import ZeroShards

_CHUNK = 1 << 20
"""Elements that are widened to fp64 at a time on CPUs."""


def wrong_sum(shards: ZeroShards) -> str | None:
    """Return the tensor of the first reduced gradient of this rank that does not fit what all ranks sent.

    All ranks call it together, after `reduce_gradients` and before the gradient is scaled.
    """
    totals = dict(shards.totals())
    ranks = range(shards.world_size)
    extents = [extent for rank in ranks for extent in shards.layout.extents(shards.position_of(rank))]
    sums = [_sums(totals[extent.tensor], extent.start, extent.stop) for extent in extents]
    sent = torch.stack(sums) if sums else torch.zeros(0, 2, dtype=torch.float64)
    shards.comm.all_reduce(sent)
    first = sum(len(shards.layout.extents(shards.position_of(rank))) for rank in range(shards.rank))
    eps = torch.finfo(shards.reduce_dtype).eps * shards.world_size
    arrived = [
        _sums(shards.master_gradient, extent.in_chunk.start, extent.in_chunk.stop)[0] for extent in shards.extents
    ]
    if not arrived:
        return None
    expected, bound = sent[first : first + len(arrived)].unbind(1)
    fits = (torch.stack(arrived) - expected).abs() <= eps * bound  # not if what arrived is NaN
    differs = ~fits & bound.isfinite()
    if not bool(differs.any()):
        return None
    return shards.extents[int(differs.nonzero()[0])].tensor


def _sums(values: Tensor, start: int, stop: int) -> Tensor:
    """Return the sum of some elements and that of their absolute values, fp64 [2]."""
    elements = values.reshape(-1)[start:stop]
    chunks = elements.split(_CHUNK) if elements.device.type == "cpu" else (elements,)
    return sum(
        (torch.stack([chunk.sum(dtype=torch.float64), chunk.abs().sum(dtype=torch.float64)]) for chunk in chunks),
        torch.zeros(2, dtype=torch.float64, device=elements.device),
    )
