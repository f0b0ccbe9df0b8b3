"""Nodes and partitions are what sinfo and scontrol say."""

from __future__ import annotations

from datetime import timedelta

import pytest

from tests.slurm.recordings import recorded
from zslurm.slurm.inventory import count_gpus, parse_addresses, parse_config, parse_nodes, parse_partitions


def test_nodes_have_gpus_a_state_and_a_reason() -> None:
    busy, _, killed, drained = parse_nodes(recorded.SINFO)
    assert (busy.name, busy.state, busy.gpus, busy.gpu_type, busy.cpus) == ("node0", "mixed", 8, "mi300x", 32)
    assert (busy.memory_mb, busy.partitions, busy.reason, busy.flags) == (20000, ("batch",), "", frozenset())
    assert (killed.state, killed.reason) == ("down", "killed")
    assert (drained.state, drained.flags, drained.reason) == (
        "idle",
        frozenset({"drain"}),
        "bad GPU, see ticket 7",
    )
    assert [node.is_usable for node in (busy, killed, drained)] == [True, False, False]


def test_a_node_that_does_not_respond_is_not_usable() -> None:
    (node,) = parse_nodes("node2\x1fidle*+reserved\x1fgpu:mi300x:8\x1f32\x1f20000\x1fbatch\x1fnone\x1e\n")
    assert (node.state, node.flags, node.is_usable) == ("idle", frozenset({"not_responding", "reserved"}), False)


def test_a_node_of_two_partitions_comes_once() -> None:
    nodes = parse_nodes(recorded.SINFO + recorded.SINFO.replace("batch", "debug"))
    assert len(nodes) == 4
    assert nodes[0].partitions == ("batch", "debug")


def test_a_partition_has_its_limits() -> None:
    (partition,) = parse_partitions(recorded.PARTITION)
    assert (partition.name, partition.nodes, partition.n_nodes) == ("batch", "node[0-3]", 4)
    assert (partition.is_default, partition.is_up, partition.max_nodes) == (True, True, None)
    assert (partition.max_time, partition.default_time) == (timedelta(days=1), timedelta(minutes=10))


# The forms that slurm.conf(5) and gres.conf(5) of Slurm describe for a node's Gres.
@pytest.mark.parametrize(
    ("gres", "gpus"),
    [
        ("gpu:mi300x:8", (8, "mi300x")),
        ("gpu:8", (8, None)),
        ("gpu:mi300x:8(S:0-1)", (8, "mi300x")),
        ("nic:8,gpu:a100:4(S:0),gpu:a100:4(S:1)", (8, "a100")),
        ("gpu:a100:4,gpu:v100:4", (8, None)),
        ("(null)", (0, None)),
        ("", (0, None)),
    ],
)
def test_gpus_are_counted(gres: str, gpus: tuple[int, str | None]) -> None:
    assert count_gpus(gres) == gpus


def test_the_addresses_of_the_nodes() -> None:
    """A node of two partitions comes twice; one that was never up has no address yet."""
    rows = ("node0\x1f10.0.0.1\x1f6818\x1e", "node0\x1f10.0.0.1\x1f6818\x1e", "cloud1\x1f\x1f0\x1e")
    assert parse_addresses("\n".join(rows) + "\n") == {"node0": ("10.0.0.1", 6818)}


def test_the_configuration_is_read_as_text() -> None:
    config = parse_config(recorded.CONFIG)
    assert config["AccountingStorageType"] == "accounting_storage/slurmdbd"
    assert config["AuthInfo"].startswith("socket=")
