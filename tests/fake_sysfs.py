"""Builds the sysfs and procfs of nodes that this machine is not: GPUs, NICs and their PCIe tree.

The forms of files follow the kernel: Documentation/ABI/stable/sysfs-class-infiniband, drivers/infiniband/core
(sysfs.c for rates and states, cache.c for the names of GID types), drivers/gpu/drm/amd/amdkfd/kfd_topology.c,
Documentation/ABI/testing/sysfs-bus-pci. The values are invented, but for the PCIe tree of `published_mi300x`: no
file was recorded on such a node.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from zslurm.slurm.hostlist import expand_ranges

RAILS = 8
NIC_NAMES = tuple(f"ionic_{index}" for index in range(RAILS))
LIMITS = """\
Limit                     Soft Limit           Hard Limit           Units
Max processes             1000                 1000                 processes
Max locked memory         {memlock:<20} unlimited            bytes
"""
PCI_IDS = """\
1002  Advanced Micro Devices, Inc. [AMD/ATI]
\t740f  Aldebaran/MI200 [Instinct MI210]
\t74a1  Aqua Vanjaram [Instinct MI300X]
\t\t1002 74a1  a card that is built so
10de  NVIDIA Corporation
\t2330  GH100 [H100 SXM5 80GB]
"""

Layout = Literal["a switch each", "a switch for two", "root ports", "no tree"]
"""How GPUs and NICs hang together:

a switch each: GPU i and NIC i behind a switch of their own, four switches on each of two NUMA nodes.
a switch for two: four switches with two GPUs and two NICs each, NUMA node by NUMA node.
root ports: GPU i and NIC i on two ports of root complex i; no switch. GPUs alternate between the NUMA nodes.
no tree: a virtual machine with every device on a bus of its own, and no NUMA nodes.
"""


@dataclass(frozen=True)
class Card:
    """What is the same for every card of a model."""

    vendor: int
    device: int
    pci_class: int
    driver: str


PEERMEM = "sys/kernel/mm/memory_peers/amdkfd/version"
"""What AMD's driver registers where the kernel has peer memory (RCCL's net_ib.cc looks for it)."""

MI300X = Card(0x1002, 0x74A1, 0x120000, "amdgpu")
H100 = Card(0x10DE, 0x2330, 0x030200, "nvidia")
POLLARA = Card(0x1DD8, 0x1002, 0x020000, "ionic")
MLX5 = Card(0x15B3, 0x1021, 0x020700, "mlx5_core")
CASSINI = Card(0x17DB, 0x0501, 0x020000, "cxi_ss1")
MI250X = Card(0x1002, 0x7408, 0x038000, "amdgpu")
MI300A = Card(0x1002, 0x74A0, 0x120000, "amdgpu")


# A real MI300X node: `lspci -PP` of its GPUs and of its ConnectX-7 (elsewhere on the page the NICs at the same
# addresses are Pensando's), and which NIC AMD calls adjacent to which GPU. From "Mapping NIC to GPU NUMA Node",
# https://instinct.docs.amd.com/projects/system-acceptance/en/latest/network/topology-mapping.html
AMD_GPUS = """\
00:01.1/01:00.0/02:00.0/03:00.0/04:00.0/05:00.0
18:01.1/19:00.0/1a:04.0/29:00.0/2a:00.0/2b:00.0
48:01.1/49:00.0/4a:04.0/59:00.0/5a:00.0/5b:00.0
60:01.1/61:00.0/62:00.0/63:00.0/64:00.0/65:00.0
78:01.1/79:00.0/7a:00.0/7b:00.0/7c:00.0/7d:00.0
98:01.1/99:00.0/9a:03.0/a3:00.0/a4:00.0/a5:00.0
c8:01.1/c9:00.0/ca:03.0/d3:00.0/d4:00.0/d5:00.0
e0:01.1/e1:00.0/e2:02.0/e5:00.0/e6:00.0/e7:00.0
"""
AMD_NICS = """\
00:01.1/01:00.0/02:01.0/09:00.0
18:01.1/19:00.0/1a:03.0/23:00.0
48:01.1/49:00.0/4a:03.0/53:00.0
60:01.1/61:00.0/62:01.0/69:00.0
78:01.1/79:00.0/7a:05.0/8f:00.0
98:01.1/99:00.0/9a:01.0/9c:00.0
c8:01.1/c9:00.0/ca:02.0/cd:00.0
e0:01.1/e1:00.0/e2:04.0/f1:00.0
"""
AMD_ADJACENT = {
    "05:00.0": "09:00.0", "2b:00.0": "23:00.0", "5b:00.0": "53:00.0", "65:00.0": "69:00.0",
    "7d:00.0": "8f:00.0", "a5:00.0": "9c:00.0", "d5:00.0": "cd:00.0", "e7:00.0": "f1:00.0",
}  # fmt: skip


class FakeNode:
    """The files of one node below `root`."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.uverbs = 0
        self.gpus = 0
        self.kfd_nodes = 0
        self.write("proc/sys/kernel/osrelease", "6.8.0-51-generic")
        self.write("proc/sys/kernel/numa_balancing", "0")
        self.write("proc/cmdline", "BOOT_IMAGE=/vmlinuz root=/dev/sda1 iommu=pt pci=realloc=off")
        self.write("proc/modules", "amdgpu 20000000 0 - Live 0x0\nib_core 500000 0 - Live 0x0")
        self.write("proc/self/limits", LIMITS.format(memlock="unlimited"))
        self.write("opt/rocm/.info/version", "6.4.1-83")
        self.write("sys/module/amdgpu/version", "6.12.12")
        self.write("usr/share/misc/pci.ids", PCI_IDS)

    def write(self, path: str, text: str) -> Path:
        """One file with the line break that the kernel ends it with."""
        file = self.root / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text + "\n", encoding="utf-8")
        return file

    def link(self, path: str, target: str) -> None:
        """A relative link, as sysfs has them."""
        place = self.root / path
        place.parent.mkdir(parents=True, exist_ok=True)
        place.symlink_to(os.path.relpath(self.root / target, place.parent))

    def pci(self, path: Sequence[str], card: Card, numa: int) -> str:
        """A PCI device at the end of a path; returns its directory."""
        device = "/".join(("sys/devices", *path))
        self.write(f"{device}/vendor", f"0x{card.vendor:04x}")
        self.write(f"{device}/device", f"0x{card.device:04x}")
        self.write(f"{device}/class", f"0x{card.pci_class:06x}")
        self.write(f"{device}/numa_node", str(numa))
        self.link(f"sys/bus/pci/devices/{path[-1]}", device)
        (self.root / f"sys/bus/pci/drivers/{card.driver}").mkdir(parents=True, exist_ok=True)
        self.link(f"{device}/driver", f"sys/bus/pci/drivers/{card.driver}")
        return device

    def amd_gpu(
        self, path: Sequence[str], numa: int, model: str | None = "AMD Instinct MI300X OAM", card: Card = MI300X
    ) -> None:
        """A GPU with its node of the KFD; the CPUs' nodes come first."""
        device = self.pci(path, card, numa)
        if model is not None:
            self.write(f"{device}/product_name", model)
        if not self.kfd_nodes:
            self.kfd_node(gpu_id=0, location=0)
            self.kfd_node(gpu_id=0, location=0)
        domain, bus, rest = path[-1].split(":")
        slot, function = rest.split(".")
        location = int(bus, 16) << 8 | int(slot, 16) << 3 | int(function)
        self.kfd_node(gpu_id=10_000 + self.gpus, location=location, domain=int(domain, 16))
        self.gpus += 1

    def kfd_node(self, gpu_id: int, location: int, domain: int = 0) -> None:
        node = f"sys/class/kfd/kfd/topology/nodes/{self.kfd_nodes}"
        self.write(f"{node}/gpu_id", str(gpu_id))
        self.write(f"{node}/properties", f"simd_count 1216\nlocation_id {location}\ndomain {domain}")
        self.kfd_nodes += 1

    def nvidia_gpu(self, path: Sequence[str], numa: int) -> None:
        self.pci(path, H100, numa)
        self.write(
            f"proc/driver/nvidia/gpus/{path[-1]}/information",
            f"Model: \t\t NVIDIA H100 80GB HBM3\nIRQ:   \t\t 100\nBus Location: \t {path[-1]}",
        )

    def nic(
        self,
        device: str,
        path: Sequence[str],
        numa: int,
        *,
        card: Card = POLLARA,
        netdev: str | None = None,
        state: str = "4: ACTIVE",
        physical_state: str = "5: LinkUp",
        rate: str = "400 Gb/sec (4X NDR)",
        link_layer: str = "Ethernet",
        gid_types: Sequence[str] = ("IB/RoCE v1", "RoCE v2"),
        abi: int = 4,
    ) -> None:
        """An RDMA device with one port."""
        entry = f"{self.pci(path, card, numa)}/infiniband/{device}"
        netdev = netdev or f"net-{device}"
        self.write(f"{'/'.join(('sys/devices', *path))}/net/{netdev}/operstate", "up")
        port = f"{entry}/ports/1"
        for name, text in (
            ("state", state), ("phys_state", physical_state), ("rate", rate), ("link_layer", link_layer),
        ):  # fmt: skip
            self.write(f"{port}/{name}", text)
        for index in range(4):
            known = index < len(gid_types)
            gid = f"fe80:0000:0000:0000:0000:00ff:fe00:{index + 1:04x}" if known else ":".join(["0000"] * 8)
            self.write(f"{port}/gids/{index}", gid)
            if known:
                self.write(f"{port}/gid_attrs/types/{index}", gid_types[index])
                self.write(f"{port}/gid_attrs/ndevs/{index}", netdev)
        self.write(f"{entry}/fw_ver", "1.117.1-a-45")
        self.link(f"{entry}/device", "/".join(("sys/devices", *path)))
        self.link(f"sys/class/infiniband/{device}", entry)
        verbs = f"sys/class/infiniband_verbs/uverbs{self.uverbs}"
        self.write(f"{verbs}/ibdev", device)
        self.write(f"{verbs}/abi_version", str(abi))
        self.uverbs += 1

    def cassini(self, index: int, path: Sequence[str], numa: int) -> None:
        """A NIC of HPE Slingshot, which is in a class of its own, with its interface hsn0, hsn1, ..."""
        device = self.pci(path, CASSINI, numa)
        self.write(f"{device}/net/hsn{index}/operstate", "up")
        self.link(f"{device}/cxi/cxi{index}/device", device)
        self.link(f"sys/class/cxi/cxi{index}", f"{device}/cxi/cxi{index}")

    def cores(self, numa: int, caches: Sequence[str]) -> None:
        """The cores of a NUMA node: a list of them for each of its L3 caches, such as `0-7,64-71`."""
        self.write(f"sys/devices/system/node/node{numa}/cpulist", ",".join(caches))
        for cache in caches:
            for core in expand_ranges(cache):
                self.write(f"sys/devices/system/cpu/cpu{core}/cache/index3/shared_cpu_list", cache)

    def take_nic_down(self, device: str) -> None:
        """A cable that was pulled."""
        port = f"sys/class/infiniband/{device}/ports/1"
        self.write(f"{port}/state", "1: DOWN")
        self.write(f"{port}/phys_state", "3: Disabled")

    def bring_nic_up(self, device: str) -> None:
        port = f"sys/class/infiniband/{device}/ports/1"
        self.write(f"{port}/state", "4: ACTIVE")
        self.write(f"{port}/phys_state", "5: LinkUp")

    def remove_nic(self, device: str) -> None:
        """A card that fell off the bus, as far as RDMA is concerned."""
        shutil.rmtree((self.root / "sys/class/infiniband" / device).resolve())
        (self.root / "sys/class/infiniband" / device).unlink()


def paths(layout: Layout, index: int) -> tuple[tuple[str, ...], tuple[str, ...], int]:
    """Path of GPU `index`, path of the NIC next to it, and their NUMA node."""
    if layout == "no tree":
        gpu, nic = f"{0x10 + index:04x}", f"{0x50 + index:04x}"
        return (f"pci{gpu}:00", f"{gpu}:00:00.0"), (f"pci{nic}:00", f"{nic}:00:00.0"), -1
    if layout == "root ports":
        bus = 0x20 * index
        top = f"pci0000:{bus:02x}"
        gpu_way = (top, f"0000:{bus:02x}:01.1", f"0000:{bus + 1:02x}:00.0")
        return gpu_way, (top, f"0000:{bus:02x}:03.1", f"0000:{bus + 2:02x}:00.0"), index % 2
    group, place = (index, 0) if layout == "a switch each" else (index // 2, index % 2)
    bus = 0x20 * group if layout == "a switch each" else 0x40 * group
    switch = (f"pci0000:{bus:02x}", f"0000:{bus:02x}:01.1", f"0000:{bus + 1:02x}:00.0")
    below = bus + 4 + 6 * place
    # A GPU of this kind has an upstream and a downstream bridge of its own.
    gpu_end = (f"0000:{bus + 2:02x}:0{2 * place}.0", f"0000:{below:02x}:00.0", f"0000:{below + 1:02x}:00.0")
    nic_end = (f"0000:{bus + 2:02x}:0{2 * place + 1}.0", f"0000:{below + 4:02x}:00.0")
    numa = index // 4
    return (*switch, *gpu_end, f"0000:{below + 2:02x}:00.0"), (*switch, *nic_end), numa


def mi300x_pollara(
    root: Path,
    *,
    layout: Layout = "a switch each",
    names: Sequence[str] = NIC_NAMES,
    missing: Collection[int] = (),
    down: Collection[int] = (),
) -> FakeNode:
    """Eight MI300X and eight Pollara NICs.

    Args:
        root: directory of the node's files.
        layout: of the PCIe tree.
        names: of the NICs next to GPU 0, 1, ...
        missing: rails without a NIC.
        down: rails whose NIC is down.
    """
    node = FakeNode(root)
    for index in range(RAILS):
        gpu, nic, numa = paths(layout, index)
        node.amd_gpu(gpu, numa)
        if index not in missing:
            node.nic(names[index], nic, numa)
        if index in down:
            node.take_nic_down(names[index])
    node.write("opt/rocm/lib/librccl-anp.so", "")
    node.write(PEERMEM, "1.0")
    return node


def published_mi300x(root: Path, names: Sequence[str]) -> FakeNode:
    """The PCIe tree that AMD published of a real MI300X node, its NICs under any names."""
    node = FakeNode(root)
    for index, line in enumerate(AMD_GPUS.split()):
        node.amd_gpu(_lspci_path(line), index // 4)
    for index, line in enumerate(AMD_NICS.split()):
        node.nic(names[index], _lspci_path(line), index // 4)
    return node


def _lspci_path(line: str) -> tuple[str, ...]:
    """sysfs's path of what `lspci -PP` writes as `00:01.1/01:00.0`."""
    return (f"pci0000:{line[:2]}", *(f"0000:{word}" for word in line.split("/")))


def h100_mlx5(root: Path) -> FakeNode:
    """Eight H100 and eight ConnectX-7 on InfiniBand, and one more ConnectX for storage on a port of its own."""
    node = FakeNode(root)
    for index in range(RAILS):
        gpu, nic, numa = paths("a switch each", index)
        node.nvidia_gpu(gpu, numa)
        node.nic(f"mlx5_{index}", nic, numa, card=MLX5, link_layer="InfiniBand", gid_types=("IB/RoCE v1",))
    node.nic("mlx5_8", ("pci0000:f0", "0000:f0:03.1", "0000:f1:00.0"), 1, card=MLX5, netdev="storage0")
    return node
