"""The ranks that share a sequence: which part of it each holds, and how they exchange what it depends on.

    context = ContextParallel(group, attention="auto")
    local_BS = context.take(tokens_BS)            # this rank's two chunks of whole rows
    before = exchange_halos(context, ...)         # what its chunks' first tokens look back at (halos.py)
    y_BSX = attend_in_context(context, q, k, v)   # over the whole sequence (attention.py)

Every operation is an exchange that all ranks of the group enter, in the order of the model's layers, forward and
backward; backward of an operation makes the same exchange with sends and receives swapped. No order can deadlock:

    Each exchange is one collective, or one batch of sends and receives. In a batch all receives and sends are
    posted before any is waited for, so no send waits for a receive that is not posted yet.
    Two exchanges of a group never run in different orders on two ranks: what is exchanged depends on shapes and
    only the configuration, never on a rank's data, and autograd runs one layer's functions one after the other.

What is counted in `sent` are the bytes that this rank sends under the best known algorithm, as in
`train/parallel/comm.py`; bytes.py has the formula.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Literal, NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from zslurm.train.context.bytes import Attention, auto_attention
from zslurm.train.context.layout import chunk_tokens, chunks_of

# torch 2.13 renamed both collectives.
_reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


class Pending(NamedTuple):
    """An exchange under way; its tensors live as long as this does."""

    works: list[dist.Work]
    received: tuple[Tensor, ...]
    kept: tuple[Tensor, ...]

    def wait(self) -> tuple[Tensor, ...]:
        """Return what was received; on a GPU the current stream waits for it."""
        for work in self.works:
            work.wait()
        return self.received


@dataclass(frozen=True)
class ContextParallel:
    """A group of ranks that share each of their sequences.

    Attributes:
        group: consecutive ranks of one node.
        attention: how keys and values reach the other ranks.
        rank: of this process in the group.
        size: ranks of the group.
        sent: bytes that this rank sent, by operation, since the counter was last cleared.
    """

    group: dist.ProcessGroup
    attention: Literal["auto", "ring", "all_gather"] = "auto"
    rank: int = field(init=False)
    size: int = field(init=False)
    sent: Counter[str] = field(init=False, compare=False, default_factory=Counter)

    def __post_init__(self) -> None:
        object.__setattr__(self, "rank", dist.get_rank(self.group))
        object.__setattr__(self, "size", dist.get_world_size(self.group))

    # --- This rank's part of a sequence ------------------------------------------------------------------------

    def take(self, x: Tensor, *, dim: int = 1, fill: float = 0, rank: int | None = None) -> Tensor:
        """Return a rank's (default: this rank's) two chunks of whole sequences, padded with `fill`."""
        length = x.shape[dim]
        chunk = chunk_tokens(length, self.size)
        if missing := 2 * self.size * chunk - length:
            x = F.pad(x, [0, 0] * (x.dim() - 1 - dim % x.dim()) + [0, missing], value=fill)
        chunks = chunks_of(self.rank if rank is None else rank, self.size)
        return torch.cat([x.narrow(dim, number * chunk, chunk) for number in chunks], dim)

    def positions(self, length: int, *, halo: int = 0, device: torch.device | None = None) -> Tensor:
        """Return the positions of this rank's tokens in a sequence of `length`, int64.

        Each chunk is preceded by those of the `halo` tokens before it. Padding has positions from `length` on,
        what would be before the first token negative ones.
        """
        chunk = chunk_tokens(length, self.size)
        starts = [number * chunk for number in chunks_of(self.rank, self.size)]
        return torch.cat([torch.arange(start - halo, start + chunk, device=device) for start in starts])

    def attention_for(self, k_BJSP: Tensor) -> Attention:
        """Return how keys of this shape, and their values, reach the other ranks."""
        if self.attention == "auto":
            return auto_attention(k_BJSP.numel(), self.size, k_BJSP.element_size())
        return self.attention

    # --- Exchanges ---------------------------------------------------------------------------------------------

    def swap_with_neighbours(
        self, to_previous: Tensor | None, to_next: Tensor | None
    ) -> tuple[Tensor | None, Tensor | None]:
        """Send each neighbour in the chain of ranks a tensor; return what the previous and the next one sent.

        All tensors have the same shape. The first rank has no previous and the last no next one: what would go to
        them, and come from them, is None.
        """
        to = {self.rank - 1: to_previous, self.rank + 1: to_next}
        sent = {rank: x for rank, x in to.items() if x is not None}
        assert set(sent) == set(to) & set(range(self.size))
        source_NX = torch.stack(list(sent.values()))
        splits = [int(rank in sent) for rank in range(self.size)]
        out_NX = torch.empty_like(source_NX)
        dist.all_to_all_single(out_NX, source_NX, splits, splits, group=self.group)
        self._count("halos", source_NX)
        received = dict(zip(sent, out_NX, strict=True))
        return received.get(self.rank - 1), received.get(self.rank + 1)

    def start_shift(self, *tensors: Tensor) -> Pending:
        """Send contiguous tensors to the next rank in the ring; what the previous one sends has their shapes.

        Receives come first: of two ranks on gloo, whose both directions share a connection, the notice that a rank
        is ready to receive would wait behind what it sends.
        """
        following, before = (dist.get_global_rank(self.group, (self.rank + step) % self.size) for step in (1, -1))
        received = tuple(torch.empty_like(x) for x in tensors)
        operations = [dist.P2POp(dist.irecv, x, before, self.group) for x in received]
        operations += [dist.P2POp(dist.isend, x, following, self.group) for x in tensors]
        for x in tensors:
            self._count("ring", x)
        return Pending(dist.batch_isend_irecv(operations), received, tensors)

    def start_all_gather(self, part: Tensor) -> Pending:
        """Collect every rank's `part` (contiguous): [size, ...]."""
        gathered = part.new_empty(self.size, *part.shape)
        self._count("all_gather", part, self.size - 1)
        work = _all_gather(gathered.view(-1), part.view(-1), group=self.group, async_op=True)
        return Pending([work], (gathered,), (part,))

    def reduce_scatter(self, whole: Tensor) -> Tensor:
        """Sum `whole` [size, ...] over all ranks and return this rank's part of it."""
        reduced = torch.empty_like(whole[0])
        self._count("reduce_scatter", reduced, self.size - 1)
        _reduce_scatter(reduced.view(-1), whole.view(-1), group=self.group)
        return reduced

    def _count(self, operation: str, sent: Tensor, times: int = 1) -> None:
        self.sent[operation] += sent.numel() * sent.element_size() * times


def context_groups(
    sizes: Iterable[int],
    attention: Literal["auto", "ring", "all_gather"] = "auto",
    timeout: timedelta | None = None,
) -> dict[int, ContextParallel]:
    """Make the groups of consecutive ranks of each size above 1; return this rank's, by size.

    Every rank of the run calls it with the same sizes, which divide the number of ranks. An exchange that takes
    longer than `timeout` fails, by default after the backend's.
    """
    groups: dict[int, ContextParallel] = {}
    for size in sorted(set(sizes) - {1}):
        first = dist.get_rank() // size * size
        # Each rank makes its own group only, all at the same point: NCCL makes those of a size in one split.
        group = dist.new_group(
            list(range(first, first + size)),
            timeout=timeout,
            use_local_synchronization=True,
            group_desc=f"context {first}",
        )
        assert group is not None
        groups[size] = ContextParallel(group, attention)
    return groups
