"""The two hops of the exchange, planned without processes: every element arrives, in few messages, on its rail."""

from __future__ import annotations

from functools import cache

import pytest

from tests.train.sharded import TABLE
from zslurm.checkpoint_tools import partition
from zslurm.train.config import ModelConfig, OptimConfig
from zslurm.train.parallel.buckets import MatrixSpace
from zslurm.train.parallel.route import Level, Route, plan_route
from zslurm.train.parallel.topology import Topology
from zslurm.train.shapes import owned_table


def routes_of(topology: Topology, bucket_elements: int) -> list[Route]:
    """The route of every position, of a few matrices."""
    space = MatrixSpace(TABLE, partition(TABLE, topology.ranks), bucket_elements)
    return [plan_route(space, position, topology) for position in range(topology.ranks)]


@pytest.mark.parametrize("topology", [Topology(2, 2), Topology(2, 3), Topology(4, 2), Topology(3, 2)], ids=str)
@pytest.mark.parametrize("bucket_elements", [64, 500])
def test_every_element_reaches_its_owner_over_two_hops(topology: Topology, bucket_elements: int) -> None:
    """The plans alone move numbered elements: what ranks send and expect agrees, and so does its order."""
    routes = routes_of(topology, bucket_elements)
    ranks, nodes, local_size = range(topology.ranks), topology.nodes, topology.local_size
    by_rank = [routes[topology.position(rank)] for rank in ranks]
    packed = [
        [e for piece in route.held for e in range(piece.start, piece.start + piece.numel)] for route in by_rank
    ]

    def hop(buffers: list[list[int]], number: int) -> list[list[int]]:
        arrived: list[list[int]] = [[] for _ in ranks]
        for receiver in ranks:
            peers = (topology.node_ranks if number == 0 else topology.rail_ranks)(receiver)
            own = peers.index(receiver)
            for index, sender in enumerate(peers):
                sends = by_rank[sender].hops[number].sends
                start = sum(sends[:own])
                part = buffers[sender][start : start + sends[own]]
                assert len(part) == by_rank[receiver].hops[number].receives[index]
                arrived[receiver] += part
        return arrived

    inside = hop(packed, 0)
    passed = []
    for rank in ranks:
        rest, parts = iter(inside[rank]), {}
        for holder in range(local_size):
            for node in range(nodes):
                parts[node, holder] = [next(rest) for _ in range(by_rank[rank].through[holder][node])]
        passed.append([e for node in range(nodes) for holder in range(local_size) for e in parts[node, holder]])
    arrived = hop(passed, 1)
    for rank in ranks:
        expected = [e for piece in by_rank[rank].owned for e in range(piece.start, piece.start + piece.numel)]
        assert arrived[rank] == expected


def test_one_level_has_one_hop_between_all() -> None:
    topology = Topology(2, 3)
    space = MatrixSpace(TABLE, partition(TABLE, topology.ranks), 64)
    for position in range(topology.ranks):
        route = plan_route(space, position)
        assert [hop.level for hop in route.hops] == [Level.ALL]
        assert sum(route.hops[0].sends) == sum(piece.numel for piece in route.held)
        assert route.passed_on == 0


@cache
def flagship() -> MatrixSpace:
    """ZAYA1-base on 1,024 ranks."""
    table = owned_table(ModelConfig(), OptimConfig())
    return MatrixSpace(table, partition(table, 1024), (64 << 20) // 4)


@pytest.mark.parametrize("rank", [0, 517, 1023])
def test_1024_ranks_send_134_messages_instead_of_1023(rank: int) -> None:
    """In each of the hops no rank sends to more than the others of its node, and of its rail."""
    topology = Topology(128, 8)
    position = topology.position(rank)
    node, local = divmod(rank, 8)
    flat = plan_route(flagship(), position).hops[0]
    inside, along = plan_route(flagship(), position, topology).hops
    assert (inside.level, along.level) == (Level.NODE, Level.RAIL)
    assert inside.messages(local) <= 7
    assert along.messages(node) <= 127
    assert 134 < flat.messages(position) <= 1023
    # What is passed on is about what is held: both hops send as much as the one hop does.
    held, passed = sum(inside.sends), sum(along.sends)
    assert held == sum(flat.sends)
    assert passed < 1.3 * held
