"""Which pairs of ranks changed numbers travel between: gradients are sent again, pair by pair, and compared.

A reduction mixes what several ranks send, so a wrong sum shows who received it, not who sent it. All pairs are
tried only after one was found: that takes ROUNDS exchanges of PIECE elements per rank.
"""

from __future__ import annotations

import torch

from zslurm.train.integrity.digest import digests
from zslurm.train.parallel.comm import all_gather_into
from zslurm.train.parallel.zero import ZeroShards

ROUNDS = 4
PIECE = 1 << 18
"""Elements that each rank sends in a round, to all ranks together."""


def wrong_pairs(shards: ZeroShards) -> list[tuple[int, int]]:
    """Return sender and receiver of each pair between which gradients arrive changed, in the order of receivers.

    All ranks call it together, before the gradients are computed again.
    """
    size = shards.world_size
    piece = min(PIECE, len(shards.gradients)) // size
    if size == 1 or not piece:
        return []
    sent = shards.gradients[: piece * size]
    arrived, expected = torch.empty_like(sent), torch.empty(size, dtype=torch.int64, device=sent.device)
    changed = torch.zeros_like(expected)
    for _ in range(ROUNDS):
        shards.comm.all_to_all(arrived, [piece] * size, sent, [piece] * size)
        shards.comm.all_to_all(expected, [1] * size, digests(sent.split(piece)), [1] * size)
        changed |= (digests(arrived.split(piece)) != expected).long()
    table = changed.new_empty(size * size)
    all_gather_into(table, changed, group=shards.comm.group)
    return [(sender, receiver) for receiver, sender in table.view(size, size).nonzero().tolist()]
