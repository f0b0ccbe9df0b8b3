"""Leaves as Slurm prints them, and nodes in their order. Real answers; their sources are next to them."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.slurm.recordings.recorded import NO_TOPOLOGY, TOPOLOGY
from zslurm.slurm.hostlist import expand
from zslurm.slurm.topology import SlurmTopology, hostlist_in_order, order_by_leaf, parse_topology

# University of Melbourne's Spartan, as published with a data set of its jobs (Slurm's own words, one line each).
SPARTAN = """\
SwitchName=sp-266-p16-1 Level=1 LinkSpeed=1 \
Switches=le-266-q11-1-res,le-266-q14-1-res,le-266-r17-1-res,le-266-r19-1-res
SwitchName=le-266-q11-1-res Level=0 LinkSpeed=1 Nodes=spartan-bm[053-066]
SwitchName=le-266-q14-1-res Level=0 LinkSpeed=1 Nodes=spartan-bm[087-125]
SwitchName=le-266-r17-1-res Level=0 LinkSpeed=1 Nodes=spartan-bm[001-020]
SwitchName=le-266-r19-1-res Level=0 LinkSpeed=1 Nodes=spartan-bm[021-029],spartan-bm[039-043]
"""
# topology/block of a GB300 cluster, as its operators published it: a line of a larger block comes with it.
BLOCKS = """\
BlockName=gb300_b0 BlockIndex=0 Nodes=10.140.71.103,10.140.88.115 BlockSize=2
BlockName=gb300_b1 BlockIndex=1 Nodes=10.140.79.152,10.140.93.120 BlockSize=2
AggregatedBlock=gb300_b[0-1] BlockIndex=2 Nodes=10.140.71.103,10.140.79.152,10.140.88.115,10.140.93.120 BlockSize=4
"""


def test_leaves_of_a_real_tree() -> None:
    leaves = parse_topology(SPARTAN).leaves
    assert list(leaves) == ["le-266-q11-1-res", "le-266-q14-1-res", "le-266-r17-1-res", "le-266-r19-1-res"]
    assert [len(nodes) for nodes in leaves.values()] == [14, 39, 20, 14]
    job = expand("spartan-bm[019-022,053-054]")
    assert hostlist_in_order(order_by_leaf(job, leaves)) == "spartan-bm[053-054],spartan-bm[019-022]"


def test_blocks_are_leaves() -> None:
    assert parse_topology(BLOCKS).leaves == {
        "gb300_b0": ["10.140.71.103", "10.140.88.115"],
        "gb300_b1": ["10.140.79.152", "10.140.93.120"],
    }


def test_what_the_test_cluster_says() -> None:
    assert parse_topology(TOPOLOGY).leaves == {
        "leaf0": ["node0", "node2", "node4", "node6"],
        "leaf1": ["node1", "node3", "node5", "node7"],
    }
    assert parse_topology(NO_TOPOLOGY) == SlurmTopology()


# Recorded from the test cluster with topology.yaml, Slurm 26.05.5: `scontrol show topology NAME` of each topology.
TREE_26 = """\
SwitchName=spine Level=1 LinkSpeed=0 Nodes=node[0-3] Switches=leaf[0-1]
SwitchName=leaf0 Level=0 LinkSpeed=0 Nodes=node[0,2]
SwitchName=leaf1 Level=0 LinkSpeed=0 Nodes=node[1,3]
"""
BLOCKS_26 = """\
BlockName=b0 BlockIndex=0 Nodes=node[0-1] BlockSize=2
BlockName=b1 BlockIndex=1 Nodes=node[2-3] BlockSize=2
AggregatedBlock=b[0-1] BlockIndex=2 Nodes=node[0-3] BlockSize=4
"""
RINGS_26 = """\
RingName=r0 Nodes=node[0,2] RingSize=2
RingName=r1 Nodes=node[1,3] RingSize=2
"""
# Of a topology that does not exist; the exit code is 0.
NONE_26 = "slurm_load_topo error: Requested topology configuration is not available\n"


@pytest.mark.parametrize(
    ("text", "kind", "leaves"),
    [
        (TREE_26, "tree", {"leaf0": ["node0", "node2"], "leaf1": ["node1", "node3"]}),
        (BLOCKS_26, "block", {"b0": ["node0", "node1"], "b1": ["node2", "node3"]}),
        (RINGS_26, "ring", {"r0": ["node0", "node2"], "r1": ["node1", "node3"]}),
        (NONE_26, "", {}),
        ("", "", {}),  # topology/flat
    ],
)
def test_the_lines_say_what_kind_of_topology_it_is(text: str, kind: str, leaves: dict[str, list[str]]) -> None:
    assert parse_topology(text) == SlurmTopology(kind, leaves)


def test_leaves_of_one_spine_follow_each_other() -> None:
    """Whatever the order of lines: a1, b1, a2 and b2 are listed, and a's leaves stay together."""
    lines = [f"SwitchName={leaf} Level=0 LinkSpeed=1 Nodes=n{leaf}" for leaf in ("a1", "b1", "a2", "b2")]
    lines += [f"SwitchName={spine} Level=1 LinkSpeed=1 Nodes=x Switches={spine}[1-2]" for spine in ("a", "b")]
    assert list(parse_topology("\n".join(lines)).leaves) == ["a1", "a2", "b1", "b2"]


def test_nodes_of_no_leaf_come_last() -> None:
    assert order_by_leaf(["n1", "n10", "n2", "x"], {"b": ["n10", "n2"], "a": ["n1"]}) == ["n2", "n10", "n1", "x"]
    assert order_by_leaf(["n10", "n2"], {}) == ["n2", "n10"]


@given(st.lists(st.integers(0, 1100), unique=True, max_size=40), st.integers(1, 4), st.randoms())
def test_any_order_is_kept_by_its_hostlist(numbers: list[int], width: int, random: object) -> None:
    nodes = [f"n{number:0{width}d}-ib" for number in numbers]
    assert expand(hostlist_in_order(nodes)) == nodes


@given(st.permutations([f"n{i}" for i in range(12)]))
def test_the_order_does_not_depend_on_how_the_nodes_came(nodes: list[str]) -> None:
    leaves = {"one": ["n3", "n11", "n4"], "two": ["n0", "n1"], "away": ["elsewhere"]}
    assert order_by_leaf(nodes, leaves) == ["n3", "n4", "n11", "n0", "n1"] + [
        f"n{i}" for i in (2, 5, 6, 7, 8, 9, 10)
    ]
