"""Attention of c ranks that share a sequence of 32,768 tokens, all c on one GPU, against one flash call.

Each rank's parts are computed and joined as in a run, one rank after the other; keys and values of the others are
there already, so this is the price of cutting attention into parts, without communication. The heads are from
zaya1-8b; the peer is torch's causal flash attention, forward, and forward and backward.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.models import recipe
from zslurm.kernels.harness.timing import medians
from zslurm.train.context.attention import attend_in_context
from zslurm.train.context.context_parallel import ContextParallel, Pending

TOKENS = 32_768
RANKS = (2, 4, 8)
_SAMPLES = 5


class OneOfThem(ContextParallel):
    """One of the ranks, to which the keys and values of all come without delay."""

    def __init__(self, rank: int, size: int, k_BJSP: Tensor, v_BJSP: Tensor) -> None:
        for name, value in {"attention": "all_gather", "rank": rank, "size": size, "sent": Counter()}.items():
            object.__setattr__(self, name, value)
        kv_2BJSP = torch.stack([k_BJSP, v_BJSP])
        every_rank = [self.take(kv_2BJSP, dim=3, rank=other) for other in range(size)]
        object.__setattr__(self, "kv_c2BJSP", torch.stack(every_rank))

    def start_all_gather(self, part: Tensor) -> Pending:
        """Return what is there."""
        return Pending([], (vars(self)["kv_c2BJSP"],), (part,))

    def reduce_scatter(self, whole: Tensor) -> Tensor:
        """Return the rank's part of what it has itself."""
        return whole[self.rank]


def rows(device: torch.device) -> Iterator[dict[str, Any]]:
    """Yield the times of one call and of c ranks, and the ratios."""
    small = device.type == "cpu"
    model, tokens = recipe("zaya1-8b"), 64 if small else TOKENS
    dtype = torch.float32 if small else torch.bfloat16
    heads = (model.query_heads, model.kv_heads, model.kv_heads)
    q, k, v = (torch.randn(1, number, tokens, model.head_dim, device=device, dtype=dtype) for number in heads)
    whole = [x.requires_grad_() for x in (q, k, v)]
    for size in RANKS[:1] if small else RANKS:
        shared = [_share(size, rank, q, k, v) for rank in range(size)]
        for backward in (False, True):
            contenders: dict[str, Callable[[], object]] = {
                "one call": lambda: _run(_flash, whole, backward),  # noqa: B023
                "parts": lambda: [_run(attend, inputs, backward) for attend, inputs in shared],  # noqa: B023
            }
            seconds = medians(contenders, device, samples=_SAMPLES)
            yield {
                "what": f"attention of {size} ranks in parts",
                "tokens": tokens,
                "passes": "forward and backward" if backward else "forward",
                "seconds": seconds,
                "share_of_one_call": seconds["one call"] / seconds["parts"],
            }


def _share(size: int, rank: int, q: Tensor, k: Tensor, v: Tensor) -> tuple[Callable[..., Tensor], list[Tensor]]:
    """Return a rank's attention and its inputs."""
    with torch.no_grad():
        context = OneOfThem(rank, size, k, v)
        inputs = [context.take(x, dim=2).requires_grad_() for x in (q, k, v)]
    return lambda *x: attend_in_context(context, *x), inputs


def _flash(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True).transpose(1, 2).flatten(2)


def _run(attend: Callable[..., Tensor], inputs: list[Tensor], backward: bool) -> None:
    with torch.set_grad_enabled(backward):
        y = attend(*inputs)
    if backward:
        torch.autograd.grad(y, inputs, torch.ones_like(y))
