"""The GPUs of a node, from sysfs: AMD through the KFD, NVIDIA through its own /proc.

If these are out of reach (as in a container without /sys/class/kfd) the PCI devices themselves are counted.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from zslurm.core.files import read_text
from zslurm.hardware.sysfs import key_values, names, pci_path, read_int, target_name

_AMD, _NVIDIA = 0x1002, 0x10DE
# Of PCI's classes: 0x03 display controllers (0x0380 and 0x0302 have no screen), 0x12 processing accelerators.
_CLASSES = (0x03, 0x12)
_MODEL_BY_ID = ("usr/share/hwdata/pci.ids", "usr/share/misc/pci.ids")


@dataclass(frozen=True)
class Gpu:
    """A GPU.

    Attributes:
        index: its number on the node, as the runtime counts if all are visible: AMD in the order of the KFD,
            NVIDIA in the order of PCI addresses.
        pci: address, such as `0000:c1:00.0`.
        path: the way there from the root complex, itself last; see `sysfs.pci_path`.
        numa: its NUMA node.
        model: name of the product.
        pci_id: vendor and device, such as `1002:74a1`.
        driver: kernel module that drives it.
    """

    index: int
    kind: Literal["amd", "nvidia"]
    pci: str | None = None
    path: tuple[str, ...] = ()
    numa: int | None = None
    model: str | None = None
    pci_id: str | None = None
    driver: str | None = None


def read_gpus(root: Path) -> list[Gpu]:
    """Return every GPU, in the order in which the runtime counts them; AMD's before NVIDIA's."""
    on_bus = {vendor: _on_bus(root, vendor) for vendor in (_AMD, _NVIDIA)}
    amd = _of_kfd(root) or on_bus[_AMD]
    return [
        _gpu(root, index, kind, address)
        for kind, addresses in (("amd", amd), ("nvidia", on_bus[_NVIDIA]))
        for index, address in enumerate(addresses)
    ]


def pci_id(root: Path, address: str) -> str | None:
    """Vendor and device of a PCI device, such as `1002:74a1`."""
    device = root / "sys/bus/pci/devices" / address
    vendor, number = read_int(device / "vendor"), read_int(device / "device")
    return None if vendor is None or number is None else f"{vendor:04x}:{number:04x}"


def numa_node(root: Path, address: str) -> int | None:
    """NUMA node of a PCI device; the kernel has -1 if the firmware does not give it."""
    numa = read_int(root / "sys/bus/pci/devices" / address / "numa_node")
    return None if numa is None or numa < 0 else numa


def _on_bus(root: Path, vendor: int) -> list[str]:
    devices = root / "sys/bus/pci/devices"
    return [
        address
        for address in names(devices)
        if read_int(devices / address / "vendor") == vendor
        and (read_int(devices / address / "class") or 0) >> 16 in _CLASSES
    ]


def _of_kfd(root: Path) -> list[str]:
    """Addresses of the KFD's GPUs in its order, which is the order of the ROCm runtime.

    A GPU in a partitioned mode is several nodes of the KFD with one PCI device.
    """
    nodes = root / "sys/class/kfd/kfd/topology/nodes"
    addresses = []
    for number in sorted((name for name in names(nodes) if name.isdecimal()), key=int):
        if not read_int(nodes / number / "gpu_id"):  # a CPU has 0
            continue
        properties = key_values(nodes / number / "properties")
        try:
            location, domain = int(properties["location_id"]), int(properties.get("domain", "0"))
        except (KeyError, ValueError):
            continue
        slot = f"{domain:04x}:{location >> 8 & 0xFF:02x}:{location >> 3 & 0x1F:02x}"
        address = f"{slot}.{location & 7}"
        # The function's bits number the partition there, and no such PCI function exists.
        addresses.append(address if (root / "sys/bus/pci/devices" / address).exists() else f"{slot}.0")
    return addresses


def _gpu(root: Path, index: int, kind: str, address: str) -> Gpu:
    device = root / "sys/bus/pci/devices" / address
    # `Model: NVIDIA H100 80GB HBM3` of the driver's /proc.
    nvidia = key_values(root / "proc/driver/nvidia/gpus" / address / "information").get("Model")
    model = read_text(device / "product_name") if kind == "amd" else nvidia
    identity = pci_id(root, address)
    return Gpu(
        index=index,
        kind="amd" if kind == "amd" else "nvidia",
        pci=address,
        path=pci_path(root, device),
        numa=numa_node(root, address),
        model=model or _model_by_id(root, identity),
        pci_id=identity,
        driver=target_name(device / "driver"),
    )


def _model_by_id(root: Path, identity: str | None) -> str | None:
    """Return what the distribution's list of PCI devices calls it.

    A line `<tab>DEVICE  NAME` below its vendor's.
    """
    if identity is None:
        return None
    vendor, device = identity.split(":")
    for database in _MODEL_BY_ID:
        _, _, below = ("\n" + (read_text(root / database) or "")).partition(f"\n{vendor}  ")
        for line in below.splitlines()[1:]:
            if line and not line.startswith(("\t", "#")):
                break
            if line.startswith(f"\t{device}  "):
                return line.split(maxsplit=1)[1]
    return None
