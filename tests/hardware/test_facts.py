"""What is read of a node, from trees of files."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path

import pytest

from tests.fake_sysfs import LIMITS, FakeNode, h100_mlx5, mi300x_pollara
from zslurm.hardware.facts import NodeFacts, from_json, read_facts
from zslurm.hardware.nics import Gid
from zslurm.hardware.sysfs import sysroot
from zslurm.slurm.on_nodes.run_on_nodes import read_answers


def test_a_node_of_amd_gpus(tmp_path: Path) -> None:
    mi300x_pollara(tmp_path)
    facts = read_facts(tmp_path)
    assert [gpu.index for gpu in facts.gpus] == list(range(8))
    first = facts.gpus[0]
    assert (first.kind, first.pci, first.numa) == ("amd", "0000:06:00.0", 0)
    assert (first.model, first.pci_id, first.driver) == ("AMD Instinct MI300X OAM", "1002:74a1", "amdgpu")
    assert first.path[0] == "pci0000:00"
    assert first.path[-1] == first.pci
    assert [gpu.numa for gpu in facts.gpus] == [0] * 4 + [1] * 4
    assert (facts.kernel, facts.numa_balancing, facts.rocm) == ("6.8.0-51-generic", 0, "6.4.1-83")
    assert facts.iommu_passthrough
    assert facts.memlock == "unlimited"
    assert facts.modules == ("amdgpu", "ib_core")
    assert facts.module_versions == {"amdgpu": "6.12.12"}
    assert facts.nvidia_driver is None


def test_its_nics(tmp_path: Path) -> None:
    mi300x_pollara(tmp_path, down=[7])
    nics = read_facts(tmp_path).nics
    assert len(nics) == 8
    nic = nics[0]
    assert (nic.device, nic.pci, nic.numa, nic.netdevs) == ("ionic_0", "0000:08:00.0", 0, ("net-ionic_0",))
    assert (nic.state, nic.physical_state, nic.rate_gbps) == ("ACTIVE", "LinkUp", 400)
    assert (nic.driver, nic.firmware, nic.abi, nic.port) == ("ionic", "1.117.1-a-45", 4, 1)
    assert nic.link_layer == "Ethernet"
    assert list(nic.gids) == [0, 1], "unset GIDs are left out"
    assert nic.gids[1] == Gid("RoCE v2", "fe80:0000:0000:0000:0000:00ff:fe00:0002", "net-ionic_0")
    assert (nics[7].state, nics[7].physical_state) == ("DOWN", "Disabled")


def test_a_node_of_nvidia_gpus(tmp_path: Path) -> None:
    h100_mlx5(tmp_path)
    facts = read_facts(tmp_path)
    assert {(gpu.kind, gpu.model, gpu.driver) for gpu in facts.gpus} == {
        ("nvidia", "NVIDIA H100 80GB HBM3", "nvidia")
    }
    assert [nic.link_layer for nic in facts.nics] == ["InfiniBand"] * 8 + ["Ethernet"]


def test_an_empty_tree_is_no_guess(tmp_path: Path) -> None:
    """A machine that shows nothing: every fact is None, and nothing fails."""
    facts = read_facts(tmp_path)
    assert facts == NodeFacts(node=facts.node, scontrol=facts.scontrol)
    assert facts.iommu_passthrough is None
    assert facts.modules is None


def test_gpus_without_the_kfd_are_counted_on_the_bus(tmp_path: Path) -> None:
    """A container that hides /sys/class/kfd."""
    node = mi300x_pollara(tmp_path)
    (node.root / "sys/class/kfd").rename(node.root / "sys/class/hidden")
    assert [gpu.pci for gpu in read_facts(tmp_path).gpus] == [f"0000:{0x20 * i + 6:02x}:00.0" for i in range(8)]


def test_a_partitioned_gpu_is_several_of_one_pci_device(tmp_path: Path) -> None:
    """In CPX mode the function's bits of the KFD's location number the partition."""
    node = FakeNode(tmp_path)
    node.amd_gpu(("pci0000:00", "0000:00:01.1", "0000:05:00.0"), 0)
    node.kfd_node(gpu_id=77, location=0x05 << 8 | 3)
    gpus = read_facts(tmp_path).gpus
    assert [(gpu.index, gpu.pci) for gpu in gpus] == [(0, "0000:05:00.0"), (1, "0000:05:00.0")]


def test_the_order_of_amd_gpus_is_the_kfds(tmp_path: Path) -> None:
    """The runtime counts as the KFD does, also if that is not the order of PCI addresses."""
    node = FakeNode(tmp_path)
    node.amd_gpu(("pci0000:c0", "0000:c0:01.1", "0000:c1:00.0"), 1)
    node.amd_gpu(("pci0000:00", "0000:00:01.1", "0000:05:00.0"), 0)
    assert [gpu.pci for gpu in read_facts(tmp_path).gpus] == ["0000:c1:00.0", "0000:05:00.0"]


def test_a_model_that_the_card_does_not_tell_comes_from_the_list_of_pci_devices(tmp_path: Path) -> None:
    node = FakeNode(tmp_path)
    node.amd_gpu(("pci0000:00", "0000:00:01.1", "0000:05:00.0"), 0, model=None)
    assert read_facts(tmp_path).gpus[0].model == "Aqua Vanjaram [Instinct MI300X]"
    (node.root / "usr/share/misc/pci.ids").unlink()
    assert read_facts(tmp_path).gpus[0].model is None


def test_a_software_device_has_no_pci_address(tmp_path: Path) -> None:
    node = FakeNode(tmp_path)
    entry = "sys/devices/virtual/infiniband/rxe0"
    node.write(f"{entry}/ports/1/state", "4: ACTIVE")
    node.link("sys/class/infiniband/rxe0", entry)
    (nic,) = read_facts(tmp_path).nics
    assert (nic.device, nic.pci, nic.path, nic.numa, nic.driver) == ("rxe0", None, (), None, None)
    assert nic.state == "ACTIVE"


@pytest.mark.parametrize(("words", "limit"), [("8388608", 8388608), ("unlimited", "unlimited")])
def test_memlock_is_the_soft_limit(tmp_path: Path, words: str, limit: int | str) -> None:
    FakeNode(tmp_path).write("proc/self/limits", LIMITS.format(memlock=words))
    assert read_facts(tmp_path).memlock == limit


def test_garbage_in_files_is_not_known(tmp_path: Path) -> None:
    node = mi300x_pollara(tmp_path)
    port = "sys/class/infiniband/ionic_0/ports/1"
    node.write(f"{port}/rate", "fast")
    node.write(f"{port}/state", "")
    node.write("proc/sys/kernel/numa_balancing", "maybe")
    node.write("sys/class/kfd/kfd/topology/nodes/2/properties", "location_id none")
    facts = read_facts(tmp_path)
    assert (facts.nics[0].rate_gbps, facts.nics[0].state, facts.numa_balancing) == (None, None, None)
    assert len(facts.gpus) == 7


def test_facts_survive_json(tmp_path: Path) -> None:
    mi300x_pollara(tmp_path)
    facts = read_facts(tmp_path)
    assert from_json(json.loads(json.dumps(asdict(facts)))) == facts


@pytest.mark.parametrize("value", [None, "x", {"gpus": []}, {"node": "n", "gpus": [{"index": "first"}]}])
def test_something_else_is_not_taken_for_facts(value: object) -> None:
    with pytest.raises(ValueError, match="validation error"):
        from_json(value)


def test_each_node_can_have_its_own_root() -> None:
    given = {"ZSLURM_SYSROOT": "/fake/%n/root", "SLURMD_NODENAME": "node3"}
    assert sysroot(given) == Path("/fake/node3/root")
    assert sysroot({}) == Path("/")


def test_the_module_answers_a_survey(tmp_path: Path) -> None:
    mi300x_pollara(tmp_path / "node3")
    done = subprocess.run(
        [sys.executable, "-m", "zslurm.hardware.facts"],
        env={"ZSLURM_SYSROOT": f"{tmp_path}/%n", "SLURMD_NODENAME": "node3", "PYTHONPATH": ":".join(sys.path)},
        capture_output=True,
        text=True,
        check=True,
    )
    (answer,) = read_answers((0.0, line) for line in done.stdout.splitlines()).values()
    assert answer.node == "node3"
    assert len(from_json(answer.value).nics) == 8
