"""Collectives in two levels have the results of flat ones, on any nodes and rails, and send nothing off a rail."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from numpy.typing import NDArray

from tests.train.ranks import in_group
from tests.train.sharded import TABLE, Few, backward, blamed, by_tensor, shards_of
from zslurm.train.config import MuonConfig, OptimConfig
from zslurm.train.optim.sharded import ShardedOptimizer
from zslurm.train.parallel.chain import Chain
from zslurm.train.parallel.comm import DONE, Comm
from zslurm.train.parallel.levels import make_levels
from zslurm.train.parallel.topology import Path, Topology
from zslurm.train.parallel.two_level import TwoLevel

SHAPES = [Topology(2, 2), Topology(2, 3), Topology(4, 2), Topology(3, 2)]
MICROBATCHES = 6
CPU = torch.device("cpu")


def collectives(group: dist.ProcessGroup, topology: Topology, in_order: bool) -> dict[str, list[float]]:
    """What this rank gets of each collective in two levels; every rank contributes its number."""
    rank, size = dist.get_rank(group), topology.ranks
    comm = TwoLevel(group, make_levels(topology, rank), CPU)
    comm.reserve(torch.empty(6 * size // topology.local_size))
    found: dict[str, torch.Tensor] = {}

    # Several under way, more than there is room for between the hops; the last one takes all of it.
    wholes = [torch.arange(float(length * size)) + 10 * rank + length for length in (3, 2, 3, 1, 6)]
    kept = [whole.clone() for whole in wholes]
    parts = [torch.empty(len(whole) // size) for whole in wholes]
    handles = [comm.reduce_scatter(part, whole) for part, whole in zip(parts, wholes, strict=True)]
    for handle in handles if in_order else reversed(handles):
        handle.wait()
    assert all(torch.equal(whole, before) for whole, before in zip(wholes, kept, strict=True))
    found["reduce_scatter"] = torch.cat(parts)

    gathered = [torch.zeros(length * size) for length in (2, 5)]
    handles = []
    for whole, length in zip(gathered, (2, 5), strict=True):
        mine = whole[length * comm.position :][:length].fill_(rank)
        handles.append(comm.all_gather(whole, mine))
    for handle in handles if in_order else reversed(handles):
        handle.wait()
    found["all_gather"] = torch.cat(gathered)
    comm.reduce_scatter(torch.empty(0), torch.empty(0)).wait()

    found["sum"] = torch.tensor([float(rank), 1.0])
    comm.all_reduce(found["sum"])
    found["least"] = torch.tensor([rank + 5])
    comm.all_reduce(found["least"], dist.ReduceOp.MIN)
    return {name: value.tolist() for name, value in found.items()}


@pytest.mark.parametrize("topology", SHAPES, ids=str)
def test_every_rank_gets_the_part_of_its_position(topology: Topology) -> None:
    size = topology.ranks
    for rank, found in enumerate(in_group(collectives, size, topology, topology.nodes == 2)):
        position, others = topology.position(rank), 10 * sum(range(size))
        assert found["reduce_scatter"] == [
            size * (length * position + i + length) + others for length in (3, 2, 3, 1, 6) for i in range(length)
        ]
        assert found["all_gather"] == [
            float(topology.rank(chunk)) for length in (2, 5) for chunk in range(size) for _ in range(length)
        ]
        assert found["sum"] == [sum(range(size)), size]
        assert found["least"] == [5]


@dataclass
class Steps:
    """What one rank has after some steps."""

    weights: dict[str, NDArray[np.float64]]
    gradients: dict[str, NDArray[np.float64]]  # NaN where another rank owns them
    norm: float
    position: int
    sent: dict[str, int]
    travelled: dict[str, int]


def two_steps(
    group: dist.ProcessGroup, topology: Topology, two_level: bool, dtype: torch.dtype, settings: dict[str, Any]
) -> Steps:
    """Two optimizer steps on microbatches that the ranks share, whose gradients are small whole numbers."""
    rank, size = dist.get_rank(group), dist.get_world_size(group)
    model = Few(dtype=dtype)
    if two_level:
        settings = settings | {"levels": make_levels(topology, rank)}
    shards = shards_of(model, group, **settings)
    shards.comm.topology = topology  # of which flat collectives know nothing; here it counts what they send
    optimizer = ShardedOptimizer(shards, OptimConfig(muon=MuonConfig(dtype="fp32")))
    for step in range(2):
        mine = range(rank, MICROBATCHES, size)
        shards.begin_step(backwards=len(mine))
        for microbatch in mine:
            backward(model, 10 * step + microbatch, integers=True)
        shards.reduce_gradients()
        norm = shards.clip_gradients(1e9)
        optimizer.step(1e-2)
        shards.gather_weights()
    return Steps(
        {name: parameter.detach().double().numpy() for name, parameter in model.named_parameters()},
        {name: value.double().numpy() for name, value in by_tensor(shards, shards.master_gradient).items()},
        norm.item(),
        shards.position,
        dict(shards.comm.sent),
        {path.value: sent for path, sent in shards.comm.travelled.items()},
    )


@pytest.mark.parametrize(
    ("topology", "dtype", "settings"),
    [
        (SHAPES[0], torch.float64, {}),
        (SHAPES[1], torch.float64, {"overlap": False}),
        (SHAPES[2], torch.float64, {"bucket_bytes": 1e9}),
        (SHAPES[3], torch.float64, {"bucket_bytes": 1.0}),
        (SHAPES[0], torch.bfloat16, {"reduce_dtype": torch.bfloat16}),
    ],
    ids=str,
)
def test_a_step_is_the_flat_one_bit_for_bit_and_stays_on_its_rail(
    topology: Topology, dtype: torch.dtype, settings: dict[str, Any]
) -> None:
    """Sums of small whole numbers are exact in any order, so that nothing but a mistake can show."""
    flat, levels = (
        in_group(two_steps, topology.ranks, topology, two_level, dtype, settings) for two_level in (False, True)
    )
    for rank, found in enumerate(levels):
        expected = flat[topology.position(rank)]  # the flat rank that owns the same
        assert found.position == topology.position(rank)
        assert found.norm == expected.norm
        for row in TABLE:
            assert np.array_equal(found.gradients[row.name], expected.gradients[row.name], equal_nan=True), (
                row.name
            )
            assert np.array_equal(found.weights[row.name], expected.weights[row.name]), row.name
        assert found.travelled.get(Path.OFF_RAIL, 0) == 0
        assert found.travelled[Path.RAIL] > 0
        assert sum(found.travelled.values()) == sum(found.sent.values())
    assert sum(found.travelled.get(Path.OFF_RAIL, 0) for found in flat) > 0
    for operation in ("reduce_scatter", "all_gather"):
        assert found.sent[operation] == pytest.approx(flat[0].sent[operation], rel=1e-3), "no byte more than flat"


def ring_bytes(group: dist.ProcessGroup, topology: Topology) -> dict[str, int]:
    """What one flat reduction sends over each kind of path."""
    comm = Comm(group, topology)
    whole = torch.ones(topology.ranks * 8)
    comm.reduce_scatter(torch.empty(8), whole).wait()
    return {path.value: sent for path, sent in comm.travelled.items()}


def test_a_flat_ring_leaves_its_rail_at_the_last_rank_of_each_node() -> None:
    sent = 4 * 8 * 5
    found = in_group(ring_bytes, 6, Topology(2, 3))
    assert found == [{"off_rail": sent} if rank in (2, 5) else {"node": sent} for rank in range(6)]


def test_the_tensor_and_the_rank_that_failed_first_are_named() -> None:
    """By its rank, not by its position: rank 1 has position 3 here."""
    faults = {0: "matrix", 4: "second", 1: "second"}
    assert in_group(blamed, 6, faults, Topology(3, 2)) == [("second", 1)] * 6


class Fails:
    """A collective that fails."""

    def wait(self) -> None:
        raise RuntimeError("connection closed by peer")


@pytest.mark.parametrize("where", [0, 1])
def test_a_hop_that_fails_raises_at_every_wait_and_at_all_chains_behind_it(where: int) -> None:
    chain, started = Chain(CPU), []

    def hop(name: str, fails: bool) -> Callable[[], Any]:
        def start() -> Any:
            started.append(name)
            return Fails() if fails else DONE

        return start

    first = chain.run(hop("a", False), hop("b", False))
    failed = chain.run(hop("c", where == 0), hop("d", where == 1), hop("e", False))
    behind = chain.run(hop("f", False))
    first.wait()
    for handle in (failed, failed, behind, behind):
        with pytest.raises(RuntimeError, match="connection closed by peer"):
            handle.wait()
    assert started == ["a", "b", "c", "d"][: 3 + where], "nothing is started after a failure"


def test_a_chain_that_was_waited_for_is_not_kept() -> None:
    """Each reduction waits for the one before it in its buffer: they must not all be kept."""
    chain = Chain(CPU)
    last = chain.run(lambda: DONE)
    first = weakref.ref(last)
    for _ in range(3):
        last = chain.run(lambda before=last: before, lambda: DONE)  # type: ignore[misc]
        last.wait()
    gc.collect()
    assert first() is None


def hopeless(group: dist.ProcessGroup) -> str:
    """What a rank raises whose peers never make a collective."""
    rank = dist.get_rank(group)
    comm = TwoLevel(group, make_levels(Topology(2, 2), rank, timedelta(seconds=1)), CPU)
    comm.reserve(torch.empty(8))
    if rank == 0:
        try:
            comm.reduce_scatter(torch.empty(1), torch.ones(4)).wait()
        except RuntimeError as error:
            return str(error)
    return ""


def test_a_collective_that_others_do_not_make_times_out() -> None:
    assert "imed out" in in_group(hopeless, 4)[0]
