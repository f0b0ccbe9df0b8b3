"""The RDMA devices of a node (/sys/class/infiniband), and Slingshot's (/sys/class/cxi). No name is assumed."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from zslurm.core.files import read_text
from zslurm.hardware.gpus import numa_node, pci_id
from zslurm.hardware.sysfs import names, pci_path, read_int, target_name

_UNSET = re.compile(r"[0:]*")
_RATE = re.compile(r"([0-9.]+) Gb/sec")


@dataclass(frozen=True)
class Gid:
    """An address of an RDMA port: its type (`RoCE v2`, `IB/RoCE v1`), itself, and the interface it belongs to."""

    type: str | None
    gid: str
    netdev: str | None = None


@dataclass(frozen=True)
class Nic:
    """An RDMA device, seen through its first port.

    Attributes:
        device: its name, such as `ionic_0` or `mlx5_3`.
        pci: address; None for a software device.
        path: see Gpu.path.
        netdevs: network interfaces on the same PCI device.
        state: of the link: ACTIVE, DOWN, INIT, ...
        physical_state: of the wire: LinkUp, Disabled, Polling, ...
        rate_gbps: speed of the link.
        link_layer: Ethernet or InfiniBand.
        firmware: version.
        gids: those that are set, by index.
        abi: version of the driver's interface for user space (uverbs); a library that is too old for it finds no
            device at all.
    """

    device: str
    pci: str | None = None
    path: tuple[str, ...] = ()
    numa: int | None = None
    netdevs: tuple[str, ...] = ()
    port: int | None = None
    state: str | None = None
    physical_state: str | None = None
    rate_gbps: float | None = None
    link_layer: str | None = None
    driver: str | None = None
    firmware: str | None = None
    gids: Mapping[int, Gid] = field(default_factory=dict)
    abi: int | None = None
    pci_id: str | None = None


def read_nics(root: Path) -> list[Nic]:
    """Return every RDMA device, by name."""
    abis = _abis(root)
    return [_nic(root, device, abis.get(device)) for device in names(root / "sys/class/infiniband")]


def read_cxi(root: Path) -> list[Nic]:
    """Return every NIC of HPE Slingshot, by name: its driver registers no RDMA device."""
    nics = []
    for device in names(root / "sys/class/cxi"):
        entry = root / "sys/class/cxi" / device
        path = pci_path(root, entry)
        address = path[-1] if path else None
        nics.append(
            Nic(
                device=device,
                pci=address,
                path=path,
                numa=None if address is None else numa_node(root, address),
                netdevs=tuple(names(entry / "device" / "net")),
                driver=None if address is None else target_name(root / "sys/bus/pci/devices" / address / "driver"),
                pci_id=None if address is None else pci_id(root, address),
            )
        )
    return nics


def _nic(root: Path, device: str, abi: int | None) -> Nic:
    entry = root / "sys/class/infiniband" / device
    path = pci_path(root, entry)
    address = path[-1] if path else None
    ports = sorted((name for name in names(entry / "ports") if name.isdecimal()), key=int)
    port = entry / "ports" / (ports[0] if ports else "1")
    rate = _RATE.match(read_text(port / "rate") or "")
    return Nic(
        device=device,
        pci=address,
        path=path,
        numa=None if address is None else numa_node(root, address),
        netdevs=tuple(names(entry / "device" / "net")),
        port=int(ports[0]) if ports else None,
        state=_word(port / "state"),
        physical_state=_word(port / "phys_state"),
        rate_gbps=float(rate[1]) if rate else None,
        link_layer=read_text(port / "link_layer"),
        driver=None if address is None else target_name(root / "sys/bus/pci/devices" / address / "driver"),
        firmware=read_text(entry / "fw_ver") or None,
        gids=_gids(port),
        abi=abi,
        pci_id=None if address is None else pci_id(root, address),
    )


def _word(path: Path) -> str | None:
    """Return the word of `4: ACTIVE`."""
    text = read_text(path)
    return None if not text else text.rpartition(":")[2].strip()


def _gids(port: Path) -> dict[int, Gid]:
    gids = {}
    for name in sorted((name for name in names(port / "gids") if name.isdecimal()), key=int):
        gid = read_text(port / "gids" / name)
        if gid and not _UNSET.fullmatch(gid):
            kind = read_text(port / "gid_attrs/types" / name) or None
            gids[int(name)] = Gid(kind, gid, read_text(port / "gid_attrs/ndevs" / name) or None)
    return gids


def _abis(root: Path) -> dict[str, int | None]:
    """ABI of each device: uverbs devices are numbered separately, and name the one that they belong to."""
    verbs = root / "sys/class/infiniband_verbs"
    return {
        device: read_int(verbs / name / "abi_version")
        for name in names(verbs)
        if (device := read_text(verbs / name / "ibdev"))
    }
