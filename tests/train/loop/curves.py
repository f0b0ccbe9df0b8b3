"""Training without files, for comparing curves: the trainer's own model, shards and optimizer on drawn tokens."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray

from tests.train.sharded import by_tensor
from zslurm.train.config import ModelConfig, OptimConfig
from zslurm.train.data.shares import SharePiece, Shares
from zslurm.train.model.zaya import build
from zslurm.train.optim.sharded import ShardedOptimizer
from zslurm.train.parallel.zero import ZeroShards
from zslurm.train.shapes import owned_table

MODEL = ModelConfig(
    vocab_size=64,
    hidden_size=32,
    layers=2,
    query_heads=2,
    kv_heads=2,
    head_dim=8,
    experts=3,
    expert_hidden_size=24,
    router_hidden_size=8,
)
MICROBATCHES = 6
SEQUENCES, CONTEXT = 2, 16
LR = 1e-2


@dataclass(frozen=True)
class Case:
    """How to train.

    Attributes:
        nudge: seed; moves every master weight to one of its two neighbours before the first step.
    """

    steps: int = 1
    dtype: torch.dtype = torch.bfloat16
    optim: OptimConfig = OptimConfig()  # noqa: RUF009 (frozen)
    settings: dict[str, Any] = field(default_factory=lambda: {"bucket_bytes": 8192.0})
    nudge: int | None = None


def train(group: dist.ProcessGroup, case: Case) -> tuple[list[float], dict[str, NDArray[np.float64]]]:
    """The loss of every step, and what this rank owns of the last step's gradient before clipping, by tensor."""
    rank, size = dist.get_rank(group), dist.get_world_size(group)
    model = build(MODEL, 3, dtype=case.dtype)
    shards = ZeroShards(model, owned_table(MODEL, case.optim), group, **case.settings)
    if case.nudge is not None:
        nudge(shards.master, case.nudge)
        shards.gather_weights()
    optimizer = ShardedOptimizer(shards, case.optim)
    losses = []
    for step in range(case.steps):
        mine = shares_of(size).of(rank)
        shards.begin_step(backwards=len(mine))
        loss_sum = torch.zeros((), dtype=torch.float64)
        for piece in mine:
            loss = loss_of(model, step, piece)
            loss.backward()
            loss_sum += loss.detach()
        shards.reduce_gradients()
        dist.all_reduce(loss_sum, group=group)
        losses.append(loss_sum.item())
        gradient = by_tensor(shards, shards.master_gradient)
        shards.clip_gradients(1.0)
        optimizer.step(LR)
        shards.gather_weights()
    return losses, {name: value.double().numpy() for name, value in gradient.items()}


def shares_of(ranks: int) -> Shares:
    """The division of a step."""
    return Shares(MICROBATCHES * SEQUENCES, SEQUENCES, ranks)


def loss_of(model: torch.nn.Module, step: int, piece: SharePiece) -> torch.Tensor:
    """What sequences of a microbatch add to the step's mean loss; the same on every rank that computes them."""
    tokens_BS = tokens_of(step, piece.number)[piece.first : piece.last]
    loss, _ = model(tokens_BS[:, :-1], tokens_BS[:, 1:], rope_base=100.0)
    part: torch.Tensor = loss / (MICROBATCHES * SEQUENCES * CONTEXT)
    return part


def tokens_of(step: int, j: int) -> torch.Tensor:
    """Text-like tokens: each depends on the one before, so there is something to learn."""
    generator = np.random.default_rng([step, j])
    tokens_BS = np.zeros((SEQUENCES, CONTEXT + 1), np.int64)
    tokens_BS[:, 0] = generator.integers(0, MODEL.vocab_size, SEQUENCES)
    choices_BS = generator.integers(0, 3, tokens_BS.shape)
    for position in range(1, CONTEXT + 1):
        tokens_BS[:, position] = (5 * tokens_BS[:, position - 1] + choices_BS[:, position]) % MODEL.vocab_size
    return torch.from_numpy(tokens_BS)


def nudge(values: torch.Tensor, seed: int) -> None:
    """Move every element by one unit in its last place, up or down."""
    generator = torch.Generator().manual_seed(seed)
    up = torch.randint(2, values.shape, generator=generator, dtype=torch.bool)
    beyond = torch.where(up, torch.inf, -torch.inf).to(values.dtype)
    values.copy_(torch.nextafter(values, beyond))
