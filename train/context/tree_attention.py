"""Decoding with keys and values divided over ranks: tree attention (Shyam et al., arXiv 2408.04093).

Every rank has the queries of the next tokens, and any part of the keys and values of those before, or none. Over
its own keys it computes the result out_r and the log-sum-exp l_r of the scores. With l the largest of the l_r,

    out = sum_r exp(l_r - l) out_r / sum_r exp(l_r - l)

takes one MAX all-reduce of the log-sum-exps and one SUM all-reduce in which numerators and denominators travel
together: two collectives a layer, of H (P + 2) numbers for each next token, however long the context is. Ring
attention would pass all keys and values round the ranks.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import Tensor


@dataclass(frozen=True)
class DividedCache:
    """Which rank of a group keeps the keys and values of which tokens.

    Attributes:
        group: the ranks that decode together, each with all weights.
        block: how many tokens in a row are one rank's; the next ones are the next rank's.
    """

    group: dist.ProcessGroup
    block: int = 64
    rank: int = field(init=False)
    size: int = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "rank", dist.get_rank(self.group))
        object.__setattr__(self, "size", dist.get_world_size(self.group))

    def keeps(self, position_S: Tensor) -> Tensor:
        """Return which tokens, by position, this rank keeps: bool [S]."""
        return position_S // self.block % self.size == self.rank

    def same_everywhere(self, number: int) -> int:
        """Return the number of the first rank on all of them."""
        value = torch.tensor(number, device="cuda" if dist.get_backend(self.group) == "nccl" else "cpu")
        dist.broadcast(value, group=self.group, group_src=0)
        return int(value)

    def attend(self, q_BHSP: Tensor, k_BJTP: Tensor, v_BJTP: Tensor, seen_ST: Tensor | None) -> Tensor:
        """Return the attention of the queries to the keys of all ranks, [B, H, S, P].

        Keys and values are this rank's, possibly none. `seen_ST` is which query sees which of them (default: every
        query all); over all ranks each query sees at least one. All ranks call it together.
        """
        out_BHSP, lse_BHS1 = partial_attention(q_BHSP, k_BJTP, v_BJTP, seen_ST)
        largest_BHS1 = lse_BHS1.clone()
        dist.all_reduce(largest_BHS1, dist.ReduceOp.MAX, group=self.group)
        share_BHS1 = (lse_BHS1 - largest_BHS1).exp()
        packed_BHSX = torch.cat([out_BHSP * share_BHS1, share_BHS1], dim=-1)
        dist.all_reduce(packed_BHSX, group=self.group)
        return (packed_BHSX[..., :-1] / packed_BHSX[..., -1:]).to(q_BHSP.dtype)


def partial_attention(
    q_BHSP: Tensor, k_BJTP: Tensor, v_BJTP: Tensor, seen_ST: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Return the attention to some of the keys and its log-sum-exp [B, H, S, 1], both in at least fp32.

    For a query that sees none of these keys they are 0 and -inf.
    """
    wide = torch.promote_types(q_BHSP.dtype, torch.float32)
    keys, tokens = k_BJTP.shape[1], q_BHSP.shape[2]
    # The query heads of one key head are rows of one product: [B, J, G * S, P].
    q_BJNP = q_BHSP.to(wide).unflatten(1, (keys, -1)).flatten(2, 3) / math.sqrt(q_BHSP.shape[-1])
    scores_BJNT = q_BJNP @ k_BJTP.to(wide).mT
    if seen_ST is not None:
        scores_BJNT.unflatten(2, (-1, tokens)).masked_fill_(~seen_ST, -math.inf)
    lse_BJN1 = scores_BJNT.logsumexp(dim=-1, keepdim=True)
    share_BJNT = (scores_BJNT - lse_BJN1.clamp_min(torch.finfo(wide).min)).exp()
    out_BJNP = share_BJNT @ v_BJTP.to(wide)
    shape = (*q_BHSP.shape[:3], -1)
    return out_BJNP.unflatten(2, (-1, tokens)).reshape(shape), lse_BJN1.unflatten(2, (-1, tokens)).reshape(shape)
