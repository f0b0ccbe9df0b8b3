"""What a node shows becomes a profile: the shipped one to extend, NICs in rail order, and comments."""

from __future__ import annotations

from dataclasses import replace
from datetime import timedelta
from pathlib import Path

import pytest

from tests.cluster.places import own
from tests.fake_sysfs import PEERMEM, FakeNode, h100_mlx5, mi300x_pollara, published_mi300x
from zslurm.cluster.probe import Probe, probe_of
from zslurm.cluster.profile_writer import Members, slurm_profile
from zslurm.cluster.rccl.environment import environment
from zslurm.cluster.site import resolve_profile
from zslurm.hardware.facts import NodeFacts, read_facts
from zslurm.slurm.inventory import SlurmPartition
from zslurm.slurm.settings import read_settings
from zslurm.slurm.topology import SlurmTopology

BATCH = SlurmPartition("batch", "node[0-3]", 4, True, True, timedelta(days=1), None, None)
NICS = tuple(f"ionic_{index}" for index in range(8))


def written(found: Probe, gpus: int = 8) -> str:
    """The profile that `init --probe` writes."""
    topology = SlurmTopology()
    return slurm_profile("lab", BATCH, Members(4, 4, gpus, "mi300x", 96), read_settings({}), topology, None, found)


def test_pollara_nodes_extend_the_profile_for_them(tmp_path: Path, site: Path) -> None:
    mi300x_pollara(tmp_path)
    found = probe_of(read_facts(tmp_path))
    assert (found.extends, found.network, found.gpu_family) == ("mi300x-pollara", "pollara", "mi300x")
    assert (found.nics, found.gpu_nics, found.gid_index) == (NICS, (), 1)
    assert found.rccl_version == "2.22.3"
    own("lab", written(found))
    cluster = resolve_profile("lab").spec.cluster
    assert (cluster.nics, cluster.rails_only, cluster.gid_index) == (NICS, True, 1)
    given = {setting.name: setting.value for setting in environment(cluster)}
    assert given["NCCL_IB_HCA"] == "=" + ",".join(NICS)
    assert given["RCCL_MSCCL_ENABLE"] == "0"


@pytest.mark.parametrize(
    ("rocm", "plugin", "transport", "plugin_variable"),
    [
        ("6.4.1-83", True, None, "librccl-anp.so"),
        ("6.4.1-83", False, "generic", None),
        ("7.2.0-5", True, None, "librccl-anp.so"),
        ("7.2.1-5", False, None, "none"),
    ],
)
def test_the_probe_finds_pollaras_transport(
    tmp_path: Path, site: Path, rocm: str, plugin: bool, transport: str | None, plugin_variable: str | None
) -> None:
    node = mi300x_pollara(tmp_path)
    node.write("opt/rocm/.info/version", rocm)
    if not plugin:
        (tmp_path / "opt/rocm/lib/librccl-anp.so").unlink()
    found = probe_of(read_facts(tmp_path))
    assert (found.ainic_transport, found.rocm_version) == (transport, rocm.partition("-")[0])
    assert any("has no librccl-anp.so" in note for note in found.notes) == (transport == "generic")
    own("lab", written(found))
    given = {setting.name: setting.value for setting in environment(resolve_profile("lab").spec.cluster)}
    assert given.get("NCCL_NET_PLUGIN") == plugin_variable
    assert given.get("RCCL_AINIC_ROCE") == ("1" if plugin_variable == "none" else None)


@pytest.mark.parametrize(
    ("symbols", "peermem", "dmabuf"),
    [
        (None, True, "0"),
        ("ffffffffc0a1b2c3 t ib_register_peer_memory_client\t[ib_core]", True, "0"),
        ("0000000000000000 T ib_register_device\t[ib_core]", False, "1"),
    ],
)
def test_the_probe_finds_peermem_as_rccl_does(
    tmp_path: Path, site: Path, symbols: str | None, peermem: bool, dmabuf: str
) -> None:
    """A client of AMD's driver, or the symbol of a kernel that has peer memory itself."""
    node = mi300x_pollara(tmp_path)
    if symbols is not None:
        (tmp_path / PEERMEM).unlink()
        node.write("proc/kallsyms", symbols)
    found = probe_of(read_facts(tmp_path))
    assert found.peermem is peermem
    own("lab", written(found))
    given = {setting.name: setting.value for setting in environment(resolve_profile("lab").spec.cluster)}
    assert given["NCCL_DMABUF_ENABLE"] == dmabuf


def test_what_cannot_be_read_of_peermem_is_left_open(tmp_path: Path) -> None:
    mi300x_pollara(tmp_path)
    (tmp_path / PEERMEM).unlink()
    assert probe_of(read_facts(tmp_path)).peermem is None
    assert "peermem" not in written(probe_of(read_facts(tmp_path)))
    h100_mlx5(tmp_path / "h100")
    assert probe_of(read_facts(tmp_path / "h100")).peermem is None


def test_the_probe_writes_down_the_numa_nodes_of_the_gpus(tmp_path: Path, site: Path) -> None:
    mi300x_pollara(tmp_path)
    found = probe_of(read_facts(tmp_path))
    assert found.gpu_numa == (0, 0, 0, 0, 1, 1, 1, 1)
    own("lab", written(found))
    assert resolve_profile("lab").spec.cluster.gpu_numa == found.gpu_numa
    mi300x_pollara(tmp_path / "vm", layout="no tree")
    assert "gpu_numa" not in written(probe_of(read_facts(tmp_path / "vm")))


def test_rails_follow_pcie_and_not_names(tmp_path: Path) -> None:
    """The tree is that of a real node; its NICs are named in another order than its GPUs are counted."""
    names = ("rdma3", "rdma0", "rdma7", "rdma2", "rdma5", "rdma1", "rdma6", "rdma4")
    published_mi300x(tmp_path, names)
    found = probe_of(read_facts(tmp_path))
    assert (found.nics, found.gpu_nics) == (names, ())
    assert "  nics: [" + ", ".join(names) + "]" in written(found)


@pytest.mark.parametrize(("there", "value"), [(True, None), (False, False)])
def test_nodes_without_scontrol_are_noted(
    tmp_path: Path, site: Path, monkeypatch: pytest.MonkeyPatch, there: bool, value: bool | None
) -> None:
    mi300x_pollara(tmp_path / "node")
    (tmp_path / "bin").mkdir()
    if there:
        (tmp_path / "bin" / "scontrol").touch(mode=0o755)
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    facts = read_facts(tmp_path / "node")
    assert facts.scontrol == there
    own("lab", written(probe_of(facts)))
    assert resolve_profile("lab").spec.cluster.scontrol_on_nodes is value


def test_h100_on_infiniband(tmp_path: Path) -> None:
    h100_mlx5(tmp_path)
    found = probe_of(read_facts(tmp_path))
    assert (found.extends, found.network, found.gpu_family) == ("h100-ib", "infiniband", "h100")
    assert found.nics == tuple(f"mlx5_{index}" for index in range(8)), "the storage NIC is no rail"
    assert found.gid_index is None


@pytest.mark.parametrize(
    ("driver", "link_layer", "extends", "network"),
    [
        ("bnxt_en", "Ethernet", "mi300x-broadcom", "broadcom"),
        ("mlx5_core", "Ethernet", "mi300x-cx7", "cx7"),
        ("mlx5_core", "InfiniBand", None, "infiniband"),
        ("irdma", "Ethernet", None, None),
    ],
)
def test_the_network_is_known_by_the_nics_driver(
    tmp_path: Path, driver: str, link_layer: str, extends: str | None, network: str | None
) -> None:
    mi300x_pollara(tmp_path)
    facts = read_facts(tmp_path)
    nics = tuple(replace(nic, driver=driver, link_layer=link_layer) for nic in facts.nics)
    found = probe_of(replace(facts, nics=nics))
    assert (found.extends, found.network) == (extends, network)


def test_only_nics_of_an_unknown_driver_make_another_network(tmp_path: Path, site: Path) -> None:
    mi300x_pollara(tmp_path)
    facts = read_facts(tmp_path)
    for nics, network in (
        (tuple(replace(nic, driver="efa") for nic in facts.nics), "other"),
        (tuple(replace(nic, driver=None) for nic in facts.nics), None),
        ((), None),
    ):
        text = written(probe_of(replace(facts, nics=nics)))
        own("lab", text)
        assert resolve_profile("lab").spec.cluster.network == network
        assert ("# network: " in text) == (network is None)


def test_another_gpu_gets_the_network_but_not_the_profile(tmp_path: Path, site: Path) -> None:
    mi300x_pollara(tmp_path)
    facts = read_facts(tmp_path)
    found = probe_of(replace(facts, gpus=tuple(replace(gpu, model="AMD Instinct MI355X") for gpu in facts.gpus)))
    assert (found.extends, found.network, found.gpu_family) == (None, "pollara", "mi355x")
    own("lab", written(found))
    cluster = resolve_profile("lab").spec.cluster
    assert (cluster.network, cluster.gpu_family, cluster.nics) == ("pollara", "mi355x", NICS)


def test_gpus_that_share_nics_are_listed(tmp_path: Path, site: Path) -> None:
    node = FakeNode(tmp_path)
    for index in range(4):
        root = f"pci0000:{0x20 * (index // 2):02x}"
        node.amd_gpu((root, f"0000:{0x20 * (index // 2) + 1 + index % 2:02x}:00.0"), index // 2)
    for index in range(2):
        node.nic(f"nic{index}", (f"pci0000:{0x20 * index:02x}", f"0000:{0x20 * index + 8:02x}:00.0"), index)
    found = probe_of(read_facts(tmp_path))
    assert (found.nics, found.gpu_nics) == (("nic0", "nic1"), (0, 0, 1, 1))
    own("lab", written(found, gpus=4))
    assert resolve_profile("lab").spec.cluster.gpu_nics == (0, 0, 1, 1)


def test_gpus_that_slurm_counts_otherwise_leave_the_nics_to_a_person(tmp_path: Path, site: Path) -> None:
    mi300x_pollara(tmp_path)
    text = written(probe_of(read_facts(tmp_path)), gpus=4)
    assert "  # nics: not filled in: Slurm counts 4 GPUs, the node's kernel 8" in text.splitlines()
    own("lab", text)
    assert resolve_profile("lab").spec.cluster.nics == ()


def test_a_rail_without_a_nic_leaves_the_nics_to_a_person(tmp_path: Path) -> None:
    mi300x_pollara(tmp_path, missing=(6,))
    found = probe_of(read_facts(tmp_path))
    assert (found.extends, found.nics) == ("mi300x-pollara", ())
    lines = written(found).splitlines()
    assert any(line.startswith("# On ") and "GPU 6 has no NIC near it" in line for line in lines)
    assert "# So cluster.nics is left out: probe a whole node, or write it by hand." in lines


def test_a_cable_that_is_out_is_noted(tmp_path: Path) -> None:
    mi300x_pollara(tmp_path, down=(6,))
    found = probe_of(read_facts(tmp_path))
    assert found.nics == NICS
    assert any("ionic_6 is DOWN" in note for note in found.notes)


def test_drivers_and_limits_are_comments(tmp_path: Path) -> None:
    mi300x_pollara(tmp_path)
    lines = written(probe_of(read_facts(tmp_path))).splitlines()
    assert any(line.startswith("# Probed ") and line.endswith(": 8 x AMD Instinct MI300X OAM.") for line in lines)
    assert "# NICs: 8 x ionic, firmware 1.117.1-a-45." in lines
    assert "# ROCm 6.4.1-83, kernel 6.8.0-51-generic." in lines
    assert "# memlock inside a job: unlimited." in lines


def test_a_node_without_anything_has_a_note(site: Path) -> None:
    found = probe_of(NodeFacts(node="n1"))
    assert (found.extends, found.network, found.nics, found.rccl_version) == (None, None, (), None)
    assert found.notes == ("Probed n1: no GPUs.",)
    own("lab", written(found, gpus=0))
    assert resolve_profile("lab").spec.cluster.network is None


def test_no_name_of_a_device_breaks_the_profile(site: Path) -> None:
    found = replace(probe_of(NodeFacts(node="n1")), notes=("x\nslurm: {nodes: 3}",), gpus=1, nics=("a: b",))
    own("lab", written(found, gpus=1))
    spec = resolve_profile("lab").spec
    assert (spec.cluster.nics, spec.slurm.nodes) == (("a: b",), 1)
