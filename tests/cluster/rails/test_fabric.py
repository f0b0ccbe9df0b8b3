"""Rings over leaf slices: the shortest by brute force, never longer than in the order of names."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.cluster.rails.fabrics import RAILS, drawn_fabrics, fabric, hops_by_hand, least_hops, published_form
from zslurm.cluster.rails.fabric import Fabric, fabric_of, most_loaded
from zslurm.config.fabric import FabricSection
from zslurm.slurm.hostlist import expand, natural_key

CHECKERED = fabric(published_form(["node[0,2,4,6]", "node[1,3,5,7]"]))
EIGHT = expand("node[0-7]")


def test_nodes_with_the_same_slices_follow_each_other() -> None:
    order = CHECKERED.order(EIGHT)
    assert order == expand("node[0,2,4,6]") + expand("node[1,3,5,7]")
    assert CHECKERED.ring_hops(order) == 6 * RAILS + 2 * 3 * RAILS
    assert CHECKERED.ring_hops(EIGHT) == 8 * 3 * RAILS, "by name every message passes a spine"


def test_one_node_sends_nothing_and_two_send_both_ways() -> None:
    assert CHECKERED.ring_hops(["node0"]) == 0
    assert CHECKERED.ring_hops(["node0", "node2"]) == 2 * RAILS
    assert CHECKERED.ring_hops(["node0", "node1"]) == 2 * 3 * RAILS


def test_rails_that_are_cut_in_different_ways() -> None:
    """Neighbours in the ring a, c, b, d share one of two rails; a and b none, and c and d none."""
    found = Fabric({"a": ("x", "x"), "b": ("y", "y"), "c": ("x", "y"), "d": ("y", "x")})
    assert found.order(["a", "b", "c", "d"]) == ["a", "c", "b", "d"]
    assert found.ring_hops(["a", "c", "b", "d"]) == 4 * (1 + 3)


@settings(deadline=None, max_examples=60)
@given(drawn_fabrics(max_nodes=6))
def test_the_order_is_the_best_of_all(drawn: tuple[Fabric, list[str]]) -> None:
    found, nodes = drawn
    order = found.order(nodes)
    assert sorted(order) == sorted(nodes)
    assert found.ring_hops(order) == hops_by_hand(found, order) == least_hops(found, nodes)


@pytest.mark.soak
@settings(deadline=None, max_examples=60)
@given(drawn_fabrics(max_nodes=8))
def test_the_order_is_the_best_of_all_up_to_eight_nodes(drawn: tuple[Fabric, list[str]]) -> None:
    found, nodes = drawn
    assert found.ring_hops(found.order(nodes)) == least_hops(found, nodes)


def test_eight_nodes_on_eight_sets_of_slices() -> None:
    found = Fabric(
        {node: tuple(f"{(index * step) % 7 // 2}" for step in (1, 2, 3)) for index, node in enumerate(EIGHT)}
    )
    assert len(found.groups(EIGHT)) > 5
    assert found.ring_hops(found.order(EIGHT)) == least_hops(found, EIGHT)


@settings(deadline=None)
@given(drawn_fabrics(max_nodes=40), st.randoms(use_true_random=False))
def test_never_more_hops_than_in_the_order_of_names(drawn: tuple[Fabric, list[str]], random: object) -> None:
    found, nodes = drawn
    by_name = sorted(nodes, key=natural_key)
    order = found.order(nodes)
    assert sorted(order, key=natural_key) == by_name
    assert found.ring_hops(order) <= found.ring_hops(by_name)
    assert order == found.order(by_name), "the same order, however the nodes come"


@settings(deadline=None, max_examples=20)
@given(st.integers(11, 60), st.integers(2, 5), st.integers(0, 2**16))
def test_nor_where_there_are_too_many_sets_of_slices_to_try_them_all(sets: int, ways: int, seed: int) -> None:
    nodes = [f"n{index}" for index in range(sets)]
    found = Fabric(
        {n: tuple(str((i * 7919 + seed * rail) % (ways + rail)) for rail in range(8)) for i, n in enumerate(nodes)}
    )
    assert found.ring_hops(found.order(nodes)) <= found.ring_hops(nodes)
    near, far = found.nearest(nodes, 7), found.farthest(nodes, 7)
    assert len({*near}) == len({*far}) == 7
    assert found.ring_hops(near) <= found.ring_hops(far)


@settings(deadline=None, max_examples=60)
@given(drawn_fabrics(max_nodes=6), st.integers(1, 6))
def test_the_nodes_of_the_shortest_and_of_the_longest_ring(drawn: tuple[Fabric, list[str]], count: int) -> None:
    found, nodes = drawn
    count = min(count, len(nodes))
    near = found.nearest(nodes, count)
    assert len(set(near)) == count
    assert found.ring_hops(near) == min(least_hops(found, some) for some in itertools.combinations(nodes, count))
    listed = list(found.slices)
    far = found.farthest(listed, min(count, len(listed)))
    rings = [least_hops(found, some) for some in itertools.combinations(listed, min(count, len(listed)))]
    assert found.ring_hops(far) == max(rings)


@settings(deadline=None, max_examples=60)
@given(drawn_fabrics(max_nodes=6), st.integers(1, 5))
def test_one_spare_is_the_one_that_costs_the_fewest_hops(drawn: tuple[Fabric, list[str]], kept: int) -> None:
    found, nodes = drawn
    here, spares = nodes[:kept], nodes[kept:]
    chosen = found.join(here, spares, 1)
    costs = {spare: least_hops(found, [*here, spare]) for spare in spares}
    assert [costs[spare] for spare in chosen] == ([min(costs.values())] if spares else [])


def test_spares_come_one_after_the_other_and_none_twice() -> None:
    kept = expand("node[1,3]")
    assert CHECKERED.join(kept, expand("node[0,2,5,7]"), 3) == ["node5", "node7", "node0"]
    assert CHECKERED.join(kept, ["node0"], 2) == ["node0"]


def test_spares_where_there_are_too_many_sets_of_slices_to_try_them_all() -> None:
    """24 nodes, no two on the same slices; two spares with a kept node's, one of which nothing is known."""
    nodes = [f"n{index:02d}" for index in range(24)]
    slices = {n: tuple(str(i * 7919 // (rail + 1) % 6) for rail in range(8)) for i, n in enumerate(nodes)}
    found = Fabric({**slices, "same1": slices["n03"], "same2": slices["n05"]})
    assert found.join(nodes[:20], ["unknown", *nodes[20:], "same2", "same1"], 2) == ["same1", "same2"]
    every = found.join(nodes[:20], [*nodes[20:], "unknown", "alone"], 9)
    assert sorted(every[:4]) == nodes[20:] and every[4:] == ["alone", "unknown"]
    assert found.join([], nodes, 24) == found.join([], nodes[::-1], 24)
    assert sorted(found.join([], nodes, 24)) == nodes


def test_of_a_whole_cluster_the_nodes_of_one_unit_are_nearest() -> None:
    """128 nodes in units of 32: 20 fit on one, 40 take two, and the worst 20 are spread over all four."""
    units = [f"n[{first:03d}-{first + 31:03d}]" for first in range(0, 128, 32)]
    whole = fabric(published_form(units))
    nodes = list(whole.slices)
    assert len({whole.slices[node] for node in whole.nearest(nodes, 20)}) == 1
    assert len({whole.slices[node] for node in whole.nearest(nodes, 40)}) == 2
    assert whole.ring_hops(whole.nearest(nodes, 20)) == 20 * RAILS
    assert whole.ring_hops(whole.farthest(nodes, 20)) == 20 * RAILS + 4 * 2 * RAILS


def test_ports_that_feed_the_uplinks_of_a_slice() -> None:
    assert most_loaded(CHECKERED, expand("node[0,2,4]")) == 0, "all on one slice: nothing goes up"
    assert most_loaded(CHECKERED, expand("node[0-2,4]")) == 3
    assert most_loaded(CHECKERED, ["node0", "elsewhere"]) == 1


def test_a_profile_without_slices_has_no_fabric() -> None:
    assert fabric_of(FabricSection(leaves=4, spines=4)) is None


def test_a_rail_that_is_not_listed_for_a_node_shares_nothing() -> None:
    section = FabricSection.model_validate(
        {"slices": [{"leaf": "a", "rails": [0], "nodes": "n[0-1]"}, {"leaf": "b", "rails": [1], "nodes": "n0"}]}
    )
    assert fabric(section).apart("n0", "n1") == 1
    assert fabric(section).apart("n0", "n7") == 2
