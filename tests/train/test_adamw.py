"""AdamW on a flat shard is torch's AdamW on the parameters themselves."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist

from tests.train.sharded import TABLE, Few, backward, shards_of
from train.config import OptimConfig
from train.optim.adamw import STATES, ShardedAdamW
from train.parallel.zero import ZeroShards

CONFIG = OptimConfig(betas=(0.8, 0.95), eps=1e-6, weight_decay=0.3)
RATES = (1e-2, 3e-2, 2e-2)


@pytest.fixture
def alone() -> Iterator[dist.ProcessGroup]:
    """A group of this process only."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    assert dist.group.WORLD is not None
    yield dist.group.WORLD
    dist.destroy_process_group()


def train(model: Few, shards: ZeroShards, optimizer: ShardedAdamW, steps: range) -> None:
    for step in steps:
        shards.zero_gradients()
        backward(model, step)
        shards.reduce_gradients()
        optimizer.step(RATES[step])
        shards.gather_weights()


def test_it_equals_torchs_optimizer_bit_for_bit(alone: dist.ProcessGroup) -> None:
    model, reference = Few(), Few()
    shards = shards_of(model, alone)
    optimizer = ShardedAdamW(shards, CONFIG)
    train(model, shards, optimizer, range(3))

    decayed = [parameter for parameter in reference.parameters() if parameter.dim() > 1]
    vectors = [parameter for parameter in reference.parameters() if parameter.dim() == 1]
    assert len(decayed) == len(vectors) == 2
    torchs = torch.optim.AdamW(
        [{"params": decayed}, {"params": vectors, "weight_decay": 0.0}],
        betas=CONFIG.betas, eps=CONFIG.eps, weight_decay=CONFIG.weight_decay, fused=True,
    )  # fmt: skip
    for step, lr in enumerate(RATES):
        for group in torchs.param_groups:
            group["lr"] = lr
        torchs.zero_grad()
        backward(reference, step)
        torchs.step()

    assert optimizer.steps == 3
    for row, place in zip(TABLE, shards.layout.placements, strict=True):
        here = slice(place.offset, place.offset + place.numel)
        expected = reference.get_parameter(row.name)
        assert torch.equal(model.get_parameter(row.name), expected), row.name
        for state, moment in optimizer.moments.items():
            assert torch.equal(moment[here].view(row.shape), torchs.state[expected][state]), (row.name, state)


def test_steps_are_taken_on_the_masters_not_on_their_rounding(alone: dist.ProcessGroup) -> None:
    """Steps far smaller than bf16 can tell add up."""
    model = Few(dtype=torch.bfloat16)
    shards = shards_of(model, alone)
    optimizer = ShardedAdamW(shards, OptimConfig(weight_decay=0.0))
    before = shards.master.clone()
    for _ in range(50):
        shards.master_gradient.fill_(1.0)
        optimizer.step(1e-4)
        shards.gather_weights()
    place = shards.layout.placements[0]
    moved = (before - shards.master)[place.offset : place.offset + place.numel]
    torch.testing.assert_close(moved, torch.full_like(moved, 50e-4), rtol=1e-2, atol=0)


def test_its_arrays_are_all_there_is_to_continue(alone: dist.ProcessGroup) -> None:
    whole_model = Few()
    whole = shards_of(whole_model, alone)
    whole_optimizer = ShardedAdamW(whole, CONFIG)
    train(whole_model, whole, whole_optimizer, range(2))
    saved = {name: array.clone() for name, array in whole_optimizer.arrays().items()}
    assert tuple(saved) == STATES
    train(whole_model, whole, whole_optimizer, range(2, 3))

    model = Few()
    shards = shards_of(model, alone)
    optimizer = ShardedAdamW(shards, CONFIG)
    for name, array in optimizer.arrays().items():
        array.copy_(saved[name])
    optimizer.restore(2)
    shards.gather_weights()
    train(model, shards, optimizer, range(2, 3))
    assert optimizer.steps == 3
    for name, array in optimizer.arrays().items():
        assert torch.equal(array, whole_optimizer.arrays()[name]), name
    assert torch.equal(shards.weights, whole.weights)


def test_padding_stays_zero(alone: dist.ProcessGroup) -> None:
    model = Few()
    shards = shards_of(model, alone)
    optimizer = ShardedAdamW(shards, CONFIG)
    train(model, shards, optimizer, range(3))
    used = torch.zeros_like(shards.master, dtype=torch.bool)
    for extent in shards.extents:
        used[extent.in_chunk] = True
    assert not used.all()
    for array in optimizer.arrays().values():
        assert array[~used].abs().max() == 0
