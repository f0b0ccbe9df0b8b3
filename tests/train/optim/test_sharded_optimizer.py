"""The optimizer of a rank: AdamW on flat shares is torch's AdamW on the parameters, and Muon gets the matrices."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist

from tests.train.ranks import in_group
from tests.train.sharded import FLAT, TABLE, Few, backward, by_tensor, shards_of
from zslurm.train.config import MuonConfig, OptimConfig
from zslurm.train.optim.adamw import MOMENTS
from zslurm.train.optim.sharded import ShardedOptimizer, matrices_of, states_of
from zslurm.train.parallel.levels import make_levels
from zslurm.train.parallel.topology import Topology
from zslurm.train.parallel.zero import ZeroShards

CONFIG = OptimConfig(betas=(0.8, 0.95), eps=1e-6, weight_decay=0.3, muon=MuonConfig(dtype="fp32"))
RATES = (1e-2, 3e-2, 2e-2)


def train(model: Few, shards: ZeroShards, optimizer: ShardedOptimizer, steps: range) -> None:
    for step in steps:
        shards.begin_step(backwards=1)
        backward(model, step)
        shards.reduce_gradients()
        optimizer.step(RATES[step])
        shards.gather_weights()


def test_adamw_equals_torchs_optimizer_bit_for_bit(alone: dist.ProcessGroup) -> None:
    """With `optim.matrices: adamw` everything is flat; with Muon, the rest is."""
    for table in (FLAT, TABLE):
        model, reference = Few(table), Few(table)
        shards = shards_of(model, alone, table)
        optimizer = ShardedOptimizer(shards, CONFIG)
        train(model, shards, optimizer, range(3))

        decayed = [parameter for parameter in reference.parameters() if parameter.dim() > 1]
        vectors = [parameter for parameter in reference.parameters() if parameter.dim() == 1]
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
        moments = {state.name: state.values for state in optimizer.states if state.name in MOMENTS}
        for extent in shards.extents:
            expected = reference.get_parameter(extent.tensor)
            same = torch.equal(model.get_parameter(extent.tensor), expected)
            assert same == (extent.offset_in_chunk < shards.layout.flat_share), extent.tensor
            for state, moment in moments.items() if same else ():
                found = moment[extent.in_chunk].view(expected.shape)
                assert torch.equal(found, torchs.state[expected][state]), (extent.tensor, state)


def test_muon_steps_every_whole_matrix_by_itself(alone: dist.ProcessGroup) -> None:
    """One matrix at a time gives the same as all of a rank together."""
    model = Few()
    shards = shards_of(model, alone)
    train(model, shards, ShardedOptimizer(shards, CONFIG), range(2))
    for row in TABLE:
        if row.whole:
            other = Few((row,))
            single = shards_of(other, alone, (row,))
            train(other, single, ShardedOptimizer(single, CONFIG), range(2))
            torch.testing.assert_close(
                model.get_parameter(row.name), other.get_parameter(row.name), rtol=1e-5, atol=1e-6
            )


def test_gate_and_up_that_are_owned_apart_are_orthogonalised_apart(alone: dist.ProcessGroup) -> None:
    """[2, 10, 4] as four matrices [5, 4] or as two [10, 4]: the step of each has singular values near 1."""
    row = next(row for row in TABLE if row.name == "halves")
    for whole, shape in ((4, (4, 5, 4)), (2, (2, 10, 4))):
        table = (replace(row, whole=whole),)
        model = Few(table)
        shards = shards_of(model, alone, table)
        before = shards.master.clone()
        config = OptimConfig(weight_decay=0.0, muon=MuonConfig(dtype="fp32", scale="original"))
        train(model, shards, ShardedOptimizer(shards, config), range(1))
        step = by_tensor(shards, before - shards.master)[row.name].view(shape)
        scale = (shape[1] / shape[2]) ** 0.5 * RATES[0]
        singular = torch.linalg.svdvals(step) / scale
        assert singular.min() > 0.5
        assert singular.max() < 1.3


def test_steps_are_taken_on_the_masters_not_on_their_rounding(alone: dist.ProcessGroup) -> None:
    """Steps far smaller than bf16 resolves add up."""
    model = Few(FLAT, dtype=torch.bfloat16)
    shards = shards_of(model, alone, FLAT)
    optimizer = ShardedOptimizer(shards, OptimConfig(weight_decay=0.0))
    before = shards.master.clone()
    for _ in range(50):
        shards.master_gradient.fill_(1.0)
        optimizer.step(1e-4)
        shards.gather_weights()
    moved = by_tensor(shards, before - shards.master)["matrix"]
    torch.testing.assert_close(moved, torch.full_like(moved, 50e-4), rtol=1e-2, atol=0)


def test_its_states_are_all_there_is_to_continue(alone: dist.ProcessGroup) -> None:
    whole_model = Few()
    whole = shards_of(whole_model, alone)
    whole_optimizer = ShardedOptimizer(whole, CONFIG)
    train(whole_model, whole, whole_optimizer, range(2))
    saved = {state.name: state.values.clone() for state in whole_optimizer.states}
    assert tuple(saved) == ("master", "exp_avg", "exp_avg_sq", "momentum")
    train(whole_model, whole, whole_optimizer, range(2, 3))

    model = Few()
    shards = shards_of(model, alone)
    optimizer = ShardedOptimizer(shards, CONFIG)
    for state in optimizer.states:
        state.values.copy_(saved[state.name])
    optimizer.steps = 2
    shards.gather_weights()
    train(model, shards, optimizer, range(2, 3))
    assert optimizer.steps == 3
    for state, expected in zip(optimizer.states, whole_optimizer.states, strict=True):
        assert torch.equal(state.values, expected.values), state.name
    assert torch.equal(shards.weights, whole.weights)


def test_a_tensor_has_the_states_of_its_optimizer(alone: dist.ProcessGroup) -> None:
    shards = shards_of(Few(), alone)
    optimizer = ShardedOptimizer(shards, CONFIG)
    rows = {row.name: row for row in TABLE}
    for extent in shards.extents:
        kept = tuple(state.name for state in optimizer.states if state.covers(extent))
        assert kept == states_of(rows[extent.tensor])
        for state in optimizer.states:
            if state.covers(extent):
                assert len(state.values[state.where(extent)]) == extent.numel
    assert {len(states_of(row)) for row in TABLE} == {2, 3}


def test_padding_stays_zero(alone: dist.ProcessGroup) -> None:
    model = Few()
    shards = shards_of(model, alone)
    optimizer = ShardedOptimizer(shards, CONFIG)
    train(model, shards, optimizer, range(3))
    for state in optimizer.states:
        used = torch.zeros_like(state.values, dtype=torch.bool)
        for extent in filter(state.covers, shards.extents):
            used[state.where(extent)] = True
        assert not used.all()
        assert state.values[~used].abs().max() == 0


def rounded_weights(
    group: dist.ProcessGroup, rounds: bool, topology: Topology | None = None
) -> np.ndarray[Any, Any]:
    """The bits of all weights after three steps, padding included."""
    model = Few(dtype=torch.bfloat16)
    levels = None if topology is None else make_levels(topology, dist.get_rank(group))
    shards = shards_of(model, group, levels=levels)
    optimizer = ShardedOptimizer(shards, CONFIG, rounds=rounds)
    for step in range(3):
        shards.begin_step(backwards=1)
        backward(model, step)
        shards.reduce_gradients()
        optimizer.step(RATES[step])
        shards.start_gathering(rounded=optimizer.rounds)
        shards.wait_for_weights()
    return shards.weights.view(torch.int16).numpy()


@pytest.mark.parametrize("ranks", [1, 2])
def test_weights_that_the_update_rounds_are_the_same_bits(alone: dist.ProcessGroup, ranks: int) -> None:
    """Which is the default for bf16 on a GPU; on a CPU the gather rounds."""
    assert not ShardedOptimizer(shards_of(Few(dtype=torch.bfloat16), alone), CONFIG).rounds
    by_update, by_gather = (
        [rounded_weights(alone, rounds)] if ranks == 1 else in_group(rounded_weights, ranks, rounds)
        for rounds in (True, False)
    )
    for one, other in zip(by_update, by_gather, strict=True):
        assert np.array_equal(one, other)


def test_and_where_they_travel_in_two_hops() -> None:
    by_update, by_gather = (
        in_group(rounded_weights, 4, rounds, Topology(nodes=2, local_size=2)) for rounds in (True, False)
    )
    for one, other in zip(by_update, by_gather, strict=True):
        assert np.array_equal(one, other)


def packed_after_a_step(group: dist.ProcessGroup) -> list[tuple[bool, int]]:
    """Of each matrix that this rank owns: whether its packed weights are its masters' rounding; its pieces."""
    shards = shards_of(Few(dtype=torch.bfloat16), group)
    optimizer = ShardedOptimizer(shards, CONFIG, rounds=True)
    found = []
    for batch in shards.layout.batches(shards.position):
        for pieces in shards.packed_weights(batch):
            for piece in pieces:
                piece.fill_(7)
    shards.master_gradient.normal_(generator=torch.Generator().manual_seed(1))
    optimizer.step(1e-2)
    for batch in shards.layout.batches(shards.position):
        matrices = matrices_of(shards.master, batch)
        for matrix_MN, pieces in zip(matrices, shards.packed_weights(batch), strict=True):
            found.append((torch.equal(torch.cat(pieces), matrix_MN.flatten().bfloat16()), len(pieces)))
    return found


def test_on_several_ranks_the_update_packs_every_weight_that_is_sent() -> None:
    found = [matrix for rank in in_group(packed_after_a_step, 3) for matrix in rank]
    assert len(found) == sum(row.whole or 0 for row in TABLE)
    assert all(equal for equal, _ in found)
    assert max(pieces for _, pieces in found) > 1, "some matrix is held by several ranks"


def test_the_update_rounds_every_weight_that_is_in_place(alone: dist.ProcessGroup) -> None:
    """On one rank that is all of them: without any gather, weights are their masters' rounding."""
    model = Few(dtype=torch.bfloat16)
    shards = shards_of(model, alone)
    optimizer = ShardedOptimizer(shards, CONFIG, rounds=True)
    shards.weights.fill_(7)
    shards.master_gradient.normal_(generator=torch.Generator().manual_seed(1))
    optimizer.step(1e-2)
    exact = by_tensor(shards, shards.master)
    for row in TABLE:
        assert torch.equal(model.get_parameter(row.name).data, exact[row.name].to(torch.bfloat16)), row.name
