"""The rails of one node: who is paired with whom, and what is wrong."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.fake_sysfs import (
    AMD_ADJACENT,
    MLX5,
    POLLARA,
    FakeNode,
    Layout,
    h100_mlx5,
    mi300x_pollara,
    paths,
    published_mi300x,
)
from zslurm.cluster.rails.map import rail_map
from zslurm.cluster.rails.types import RailMap
from zslurm.config.spec import ClusterSection
from zslurm.hardware.facts import NodeFacts, read_facts
from zslurm.hardware.gpus import Gpu
from zslurm.hardware.nics import Nic
from zslurm.hardware.pairing import near, pair

NAMES = tuple(f"ionic_{index}" for index in range(8))
LAYOUTS: tuple[Layout, ...] = ("a switch each", "a switch for two", "root ports")


def profile(**fields: Any) -> ClusterSection:
    return ClusterSection(**{"gpus_per_node": 8, "nics": NAMES, "network": "pollara", "gid_index": 1} | fields)


def kinds(found: RailMap) -> list[tuple[str, int | None]]:
    return [(problem.kind, problem.rail) for problem in found.problems]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_pcie_pairs_each_gpu_with_its_nic(tmp_path: Path, layout: Layout) -> None:
    mi300x_pollara(tmp_path, layout=layout)
    found = rail_map(read_facts(tmp_path), profile(nics=()))
    assert [(rail.gpus, rail.nic) for rail in found.rails] == [((i,), f"ionic_{i}") for i in range(8)]
    assert found.source == "pcie"
    assert found.problems == ()
    rail = found.rails[1]
    assert rail.near == ("root complex" if layout == "root ports" else "switch")
    assert (rail.netdev, rail.state, rail.rate_gbps, rail.gid_index) == ("net-ionic_1", "ACTIVE", 400, 1)


@pytest.mark.parametrize("layout", LAYOUTS)
@settings(max_examples=6, deadline=None)
@given(order=st.permutations(range(8)), seed=st.integers(0, 99))
def test_pairing_is_one_to_one_whatever_the_names(
    tmp_path_factory: pytest.TempPathFactory, layout: Layout, order: list[int], seed: int
) -> None:
    """Names and the order in which devices are listed say nothing: the PCI addresses of a pair stay the same."""
    root = tmp_path_factory.mktemp("node")
    names = [f"rdma{index}" for index in order]
    mi300x_pollara(root, layout=layout, names=names)
    facts = read_facts(root)
    nics = list(facts.nics)
    random.Random(seed).shuffle(nics)
    paired = pair(facts.gpus, nics)
    assert {index: nic.device for index, nic in paired.items()} == dict(enumerate(names))


@settings(max_examples=6, deadline=None)
@given(order=st.permutations(range(8)))
def test_a_real_nodes_tree_is_paired_as_amd_says(
    tmp_path_factory: pytest.TempPathFactory, order: list[int]
) -> None:
    """The tree and the table of adjacent GPUs and NICs that AMD published of an MI300X node."""
    root = tmp_path_factory.mktemp("node")
    published_mi300x(root, [f"rdma{index}" for index in order])
    found = rail_map(read_facts(root), profile(nics=()))
    pairs = {rail.gpu_pci[0]: rail.nic_pci for rail in found.rails}
    assert pairs == {f"0000:{gpu}": f"0000:{nic}" for gpu, nic in AMD_ADJACENT.items()}
    assert found.problems == ()


@given(
    places=st.lists(st.tuples(st.integers(0, 3), st.integers(0, 3), st.integers(0, 1)), min_size=1, max_size=8),
    order=st.permutations(range(8)),
)
@settings(max_examples=60, deadline=None)
def test_equally_many_near_nics_are_never_shared(places: list[tuple[int, int, int]], order: list[int]) -> None:
    """Any tree in which every GPU has a NIC next to it: a bijection, and no GPU further away than needed."""
    gpus, nics = [], []
    for index, (root, port, numa) in enumerate(places):
        way = (f"pci{root}", f"port{root}{port}", f"bridge{index % 2}")
        gpus.append(Gpu(index, "amd", f"g{index}", (*way, f"g{index}"), numa))
        nics.append(Nic(f"rdma{order[index]}", f"n{index}", (*way, f"n{index}"), numa))
    paired = pair(gpus, nics)
    assert sorted(paired) == list(range(len(places)))
    assert len({nic.device for nic in paired.values()}) == len(places)
    assert all(near(gpus[index], nic) == "switch" for index, nic in paired.items())


def test_a_virtual_machine_shows_nothing_and_that_is_a_problem(tmp_path: Path) -> None:
    mi300x_pollara(tmp_path, layout="no tree")
    found = rail_map(read_facts(tmp_path), profile(nics=()))
    assert {rail.near for rail in found.rails} == {"far"}
    assert len({rail.nic for rail in found.rails}) == 8
    assert kinds(found) == [("unreadable", i) for i in range(8)]
    assert rail_map(read_facts(tmp_path), profile()).problems == (), "the profile knows"


def test_the_profile_is_held_against_pcie(tmp_path: Path) -> None:
    """Two names exchanged: traffic of both ranks would take the other's plane by name, not by PCIe."""
    names = list(NAMES)
    names[2], names[5] = names[5], names[2]
    mi300x_pollara(tmp_path, names=names)
    found = rail_map(read_facts(tmp_path), profile())
    assert kinds(found) == [("permuted", 2), ("permuted", 5)]
    assert not found.incomplete
    assert found.problems[0].message == "GPU 2: the profile has ionic_2, but ionic_5 is closer on PCIe"


def test_a_profile_with_the_real_order_has_no_problem(tmp_path: Path) -> None:
    names = [f"rdma{index}" for index in (3, 1, 0, 2, 7, 6, 5, 4)]
    mi300x_pollara(tmp_path, names=names)
    found = rail_map(read_facts(tmp_path), profile(nics=tuple(names)))
    assert [rail.nic for rail in found.rails] == names
    assert found.problems == ()


def test_gpu_nics_of_the_profile(tmp_path: Path) -> None:
    """Two GPUs on each of four NICs: as the profile has it, not a problem."""
    mi300x_pollara(tmp_path, layout="a switch for two", missing=[1, 3, 5, 7])
    nics = tuple(NAMES[index] for index in (0, 2, 4, 6))
    found = rail_map(read_facts(tmp_path), profile(nics=nics, gpu_nics=(0, 0, 1, 1, 2, 2, 3, 3)))
    assert [rail.gpus for rail in found.rails] == [(0, 1), (2, 3), (4, 5), (6, 7)]
    assert found.problems == ()
    by_pcie = rail_map(read_facts(tmp_path), profile(nics=()))
    assert [(rail.gpus, rail.nic) for rail in by_pcie.rails] == [(rail.gpus, rail.nic) for rail in found.rails]
    assert by_pcie.problems == ()


def test_a_missing_nic_of_the_profile(tmp_path: Path) -> None:
    mi300x_pollara(tmp_path, missing=[3])
    found = rail_map(read_facts(tmp_path), profile())
    assert kinds(found) == [("missing-nic", 3)]
    assert found.incomplete == found.problems
    assert found.problems[0].message == "rail 3: ionic_3 is missing (7 RDMA devices are there)"


def test_a_missing_nic_by_pcie_alone(tmp_path: Path) -> None:
    """No other GPU's NIC is given to the GPU that lost its own."""
    mi300x_pollara(tmp_path, missing=[3])
    found = rail_map(read_facts(tmp_path), profile(nics=()))
    assert kinds(found) == [("no-near-nic", 3)]
    assert found.rails[3].nic is None
    assert found.problems[0].message == "GPU 3 has no NIC near it on PCIe, as the others have"


def test_a_nic_shared_by_two_gpus_where_the_others_have_one_each(tmp_path: Path) -> None:
    mi300x_pollara(tmp_path, layout="a switch for two", missing=[3])
    found = rail_map(read_facts(tmp_path), profile(nics=()))
    assert kinds(found) == [("shared-nic", 2)]
    assert found.problems[0].message == "rail 2: GPUs 2, 3 share ionic_2, as no others do"
    assert found.incomplete


def test_a_nic_that_is_down(tmp_path: Path) -> None:
    mi300x_pollara(tmp_path, down=[6])
    found = rail_map(read_facts(tmp_path), profile())
    assert kinds(found) == [("nic-down", 6)]
    assert found.problems[0].message == "rail 6: ionic_6 is DOWN (Disabled)"


def test_a_nic_that_does_not_tell_its_state_is_not_called_healthy(tmp_path: Path) -> None:
    node = mi300x_pollara(tmp_path)
    node.write("sys/class/infiniband/ionic_4/ports/1/state", "")
    found = rail_map(read_facts(tmp_path), profile())
    assert kinds(found) == [("unreadable", 4)]
    assert not found.incomplete


@pytest.mark.parametrize(
    ("types", "gid_index", "message"),
    [
        (("IB/RoCE v1", "RoCE v2"), 3, "has RoCE v2 at GID index 1; index 3 is not set"),
        (("RoCE v2", "IB/RoCE v1"), 1, "has RoCE v2 at GID index 0; index 1 is IB/RoCE v1"),
        (("IB/RoCE v1",), None, "has no GID of RoCE v2"),
        ((), 1, "has no GID: its interface has no address"),
    ],
)
def test_the_gid_index_must_be_of_roce_v2(
    tmp_path: Path, types: tuple[str, ...], gid_index: int | None, message: str
) -> None:
    node = FakeNode(tmp_path)
    gpu, nic, numa = paths("a switch each", 0)
    node.amd_gpu(gpu, numa)
    node.nic("rocep1", nic, numa, gid_types=types)
    found = rail_map(read_facts(tmp_path), profile(gpus_per_node=1, nics=("rocep1",), gid_index=gid_index))
    assert [problem.message for problem in found.problems] == [f"rail 0: rocep1 {message}"]
    assert found.incomplete


def test_a_slow_rail_is_a_warning(tmp_path: Path) -> None:
    node = mi300x_pollara(tmp_path)
    node.write("sys/class/infiniband/ionic_1/ports/1/rate", "200 Gb/sec (4X HDR)")
    found = rail_map(read_facts(tmp_path), profile())
    assert [problem.message for problem in found.problems] == ["rail 1: ionic_1 runs at 200 Gb/s, others at 400"]
    assert not found.incomplete


def test_a_lost_gpu(tmp_path: Path) -> None:
    node = FakeNode(tmp_path)
    for index in range(8):
        gpu, nic, numa = paths("a switch each", index)
        if index != 7:
            node.amd_gpu(gpu, numa)
        node.nic(f"ionic_{index}", nic, numa)
    found = rail_map(read_facts(tmp_path), profile())
    assert kinds(found) == [("missing-gpu", None)]
    assert found.problems[0].message == "7 of 8 GPUs are there"


def test_unseen_gpus_are_unknown_not_missing(tmp_path: Path) -> None:
    found = rail_map(NodeFacts("node0"), profile(nics=()))
    assert kinds(found) == [("unreadable", None)]


def test_infiniband_beside_a_storage_card(tmp_path: Path) -> None:
    """The card that is no GPU's neighbour is no rail, and InfiniBand needs no GID of RoCE v2."""
    h100_mlx5(tmp_path)
    found = rail_map(read_facts(tmp_path), ClusterSection(gpus_per_node=8, network="infiniband"))
    assert [rail.nic for rail in found.rails] == [f"mlx5_{i}" for i in range(8)]
    assert found.others == ("mlx5_8",)
    assert found.problems == ()


def test_a_storage_card_closer_than_the_rails_is_left_out_by_interface_or_by_driver(tmp_path: Path) -> None:
    """Rails of one maker, storage of another, both behind GPU 0's switch."""
    node = mi300x_pollara(tmp_path)
    gpu, _, numa = paths("a switch each", 0)
    node.nic("aaa_0", (*gpu[:4], "0000:1e:00.0"), numa, card=MLX5, netdev="storage0")
    facts = read_facts(tmp_path)
    for known in ({"network": "pollara"}, {"network": None, "storage_interface": "storage0"}):
        found = rail_map(facts, profile(nics=(), **known))
        assert [rail.nic for rail in found.rails] == list(NAMES)
        assert found.others == ("aaa_0",)


def test_more_nics_of_the_same_kind_than_gpus(tmp_path: Path) -> None:
    node = mi300x_pollara(tmp_path)
    node.nic("aardvark", ("pci0000:f0", "0000:f0:03.1", "0000:f1:00.0"), 1, card=POLLARA)
    found = rail_map(read_facts(tmp_path), profile(nics=()))
    assert [rail.nic for rail in found.rails] == list(NAMES)
    assert found.others == ("aardvark",)
