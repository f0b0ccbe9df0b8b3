"""Which nodes are checked."""

from __future__ import annotations

import pytest

from zslurm.core.errors import ConfigError, NotFound
from zslurm.doctor.check import Status
from zslurm.doctor.nodes import Chosen, choose
from zslurm.slurm.hostlist import HostlistError
from zslurm.slurm.inventory import Node


def node(name: str, state: str = "idle", *flags: str, reason: str = "", partition: str = "batch") -> Node:
    return Node(name, state, frozenset(flags), 8, "mi300x", 32, 20000, (partition,), reason)


NODES = [
    node("node0"),
    node("node1", "allocated"),
    node("node2", "idle", "drain", reason="bad fan"),
    node("node3", "down", "not_responding"),
    node("node4"),
    node("login", partition="small"),
]


def test_all_idle_nodes_of_the_partition_are_asked_and_the_others_are_named() -> None:
    chosen = choose(NODES, partition="batch")
    assert (chosen.names, chosen.count, chosen.any) == (("node0", "node4"), None, True)
    assert chosen.not_asked == {
        "node1": "busy (allocated)",
        "node2": "idle+drain: bad fan",
        "node3": "down+not_responding",
    }
    assert {name: outcome.status for name, outcome in chosen.states.items()} == {
        "node2": Status.WARN,
        "node3": Status.WARN,
    }


def test_named_nodes_that_cannot_be_used_fail_before_anything_is_asked() -> None:
    chosen = choose(NODES, partition="batch", nodelist="node[0-2]")
    assert chosen.names == ("node0", "node1")  # a busy node is waited for
    assert chosen.states["node2"].status is Status.FAIL
    assert chosen.states["node2"].reason == "Slurm shows idle+drain: bad fan"


def test_a_number_of_nodes_is_slurms_to_choose() -> None:
    assert choose(NODES, partition="batch", count=3) == Chosen(count=3)
    with pytest.raises(ConfigError, match=r"^--nodes 4: of the 5 nodes of batch 3 are usable$"):
        choose(NODES, partition="batch", count=4)


def test_nodes_that_do_not_exist_are_refused() -> None:
    with pytest.raises(NotFound, match=r"^node\[8-9\]: Slurm has no such node; its nodes: "):
        choose(NODES, partition=None, nodelist="node[0,8-9]")
    with pytest.raises(HostlistError):
        choose(NODES, partition=None, nodelist="node[0")


def test_without_an_idle_node_none_is_asked() -> None:
    assert not choose([node("node1", "allocated")], partition=None).any
