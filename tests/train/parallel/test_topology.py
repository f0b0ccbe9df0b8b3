"""Ranks fill nodes, rails join equal local ranks, and what a node leaves on a rail is contiguous in the layout."""

from __future__ import annotations

import pytest

from zslurm.train.parallel.topology import Path, Topology

SHAPES = [Topology(1, 4), Topology(4, 1), Topology(2, 2), Topology(3, 2), Topology(2, 3), Topology(128, 8)]


@pytest.mark.parametrize("topology", SHAPES, ids=str)
def test_every_rank_has_one_position(topology: Topology) -> None:
    positions = [topology.position(rank) for rank in range(topology.ranks)]
    assert sorted(positions) == list(range(topology.ranks))
    assert [topology.rank(position) for position in positions] == list(range(topology.ranks))


@pytest.mark.parametrize("topology", SHAPES, ids=str)
def test_the_positions_of_a_rail_follow_each_other_node_by_node(topology: Topology) -> None:
    for local in range(topology.local_size):
        positions = [topology.position(rank) for rank in topology.rail_ranks(local)]
        assert positions == list(range(local * topology.nodes, (local + 1) * topology.nodes))


def test_nodes_and_rails_cross_in_one_rank() -> None:
    topology = Topology(3, 4)
    assert list(topology.node_ranks(6)) == [4, 5, 6, 7]
    assert list(topology.rail_ranks(6)) == [2, 6, 10]


def test_a_message_travels_inside_a_node_along_a_rail_or_off_it() -> None:
    topology = Topology(2, 3)
    assert topology.path(0, 2) is Path.NODE
    assert topology.path(1, 4) is Path.RAIL
    assert topology.path(2, 3) is Path.OFF_RAIL
    assert Topology(4, 1).path(0, 3) is Path.RAIL
