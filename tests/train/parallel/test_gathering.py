"""The weights' gathers run under the next forward: the same bits, each waited for before it is read, none lost."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch import Tensor

from tests.train.loop.curves import MODEL, SEQUENCES, loss_of
from tests.train.ranks import in_group
from zslurm.train.config import OptimConfig
from zslurm.train.data.shares import SharePiece
from zslurm.train.model.zaya import build
from zslurm.train.optim.sharded import ShardedOptimizer
from zslurm.train.parallel.zero import ZeroShards
from zslurm.train.shapes import owned_table


def prefetched_steps(group: dist.ProcessGroup, ahead: bool) -> tuple[list[float], NDArray[np.int16], int]:
    """Three steps of the real model: their losses, the weights' bits, and how often forward had to wait.

    With `ahead` the gathers run under the next forward, which waits layer by layer; else they end before it.
    """
    config = OptimConfig()
    model = build(MODEL, 3, dtype=torch.bfloat16)
    shards = ZeroShards(model, owned_table(MODEL, config), group, bucket_bytes=8192.0)
    optimizer = ShardedOptimizer(shards, config)
    waits: list[str | None] = []

    def wait(module: str | None) -> None:
        if shards.is_gathering(module):
            waits.append(module)
            shards.wait_for_weights(module)

    model.call_before(wait)
    losses = []
    for step in range(3):
        shards.begin_step(backwards=2)
        total = torch.zeros((), dtype=torch.float64)
        for j in range(2):
            loss = loss_of(model, step, SharePiece(2 * shards.rank + j, 0, SEQUENCES))
            loss.backward()
            total += loss.detach()
        shards.reduce_gradients()
        dist.all_reduce(total, group=group)
        losses.append(total.item())
        optimizer.step(1e-2)
        shards.start_gathering()
        if not ahead:
            shards.wait_for_weights()
    shards.wait_for_weights()
    assert not shards.is_gathering()
    return losses, shards.weights.view(torch.int16).numpy(), len(set(waits))


def test_weights_gathered_under_the_next_forward_are_the_same_bits() -> None:
    ahead, before = (in_group(prefetched_steps, 2, chosen) for chosen in (True, False))
    for (losses, weights, waits), (expected, expected_weights, none) in zip(ahead, before, strict=True):
        assert losses == expected
        assert np.array_equal(weights, expected_weights)
        assert waits == 1 + MODEL.layers, "the flat space, then each layer for itself"
        assert none == 0
    assert np.array_equal(ahead[0][1], ahead[1][1])


class Pending:
    """A gather that ends when it is waited for, or fails."""

    def __init__(self, failure: str | None = None) -> None:
        self.failure, self.waited = failure, 0

    def wait(self) -> None:
        self.waited += 1
        if self.failure:
            raise RuntimeError(self.failure)


def pending(alone: dist.ProcessGroup, monkeypatch: pytest.MonkeyPatch) -> tuple[ZeroShards, list[Pending]]:
    """Shards of the real model in buckets as on several ranks, and its gathers in the order of their start."""
    config = OptimConfig()
    model = build(MODEL, 3, dtype=torch.float32)
    shards = ZeroShards(model, owned_table(MODEL, config), alone, bucket_bytes=8192.0)
    shards._buckets = shards._space.buckets
    started: list[Pending] = []

    def gather(whole: Tensor, part: Tensor) -> Pending:
        started.append(Pending())
        return started[-1]

    monkeypatch.setattr(shards.comm, "all_gather", gather)
    shards.start_gathering()
    return shards, started


def test_a_layer_waits_for_its_own_buckets_in_the_order_in_which_they_were_started(
    alone: dist.ProcessGroup, monkeypatch: pytest.MonkeyPatch
) -> None:
    shards, started = pending(alone, monkeypatch)
    assert len(started) > 1 + MODEL.layers, "several buckets for a layer"
    shards.wait_for_weights("embedding")
    assert [each.waited for each in started] == [1] + [0] * (len(started) - 1), "the flat space comes first"
    for layer in range(MODEL.layers):
        shards.wait_for_weights(f"layers.{layer}")
        done = sum(each.waited for each in started)
        assert [each.waited for each in started] == [1] * done + [0] * (len(started) - done)
        assert (done == len(started)) == (layer == MODEL.layers - 1)
    assert not shards.is_gathering()


@pytest.mark.parametrize("where", ["layer", "reduction", "next gather"])
def test_a_gather_that_failed_is_not_lost(
    where: str, alone: dist.ProcessGroup, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The last one: the last layer's, which no forward waits for if a rank has no microbatch."""
    shards, started = pending(alone, monkeypatch)
    started[-1].failure = "connection closed by peer"
    waits: dict[str, Callable[[], None]] = {
        "layer": lambda: shards.wait_for_weights(f"layers.{MODEL.layers - 1}"),
        "reduction": shards.reduce_gradients,
        "next gather": shards.start_gathering,
    }
    for _ in range(2):  # and it stays failed
        with pytest.raises(RuntimeError, match="connection closed by peer"):
            waits[where]()
        assert shards.is_gathering()
