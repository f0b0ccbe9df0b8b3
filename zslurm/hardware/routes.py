"""Where a name leads, and through which interface an address is reached."""

from __future__ import annotations

import ipaddress
import socket
from pathlib import Path

from zslurm.core.files import read_text

_UP = 0x1  # RTF_UP of linux/route.h


def addresses(name: str, root: Path) -> list[str]:
    """Addresses of a name, from /etc/hosts below the root, then as this machine resolves names."""
    listed = [
        words[0]
        for line in (read_text(root / "etc/hosts") or "").splitlines()
        if name in (words := line.partition("#")[0].split())[1:]
    ]
    if listed:
        return listed
    try:
        found = socket.getaddrinfo(name, None, proto=socket.IPPROTO_TCP)
    except (OSError, UnicodeError):
        return []
    return list(dict.fromkeys(str(entry[4][0]) for entry in found))


def interface_to(address: str, root: Path) -> str | None:
    """The interface of the most specific route to an address; None where there is none, or it is not known."""
    target = ipaddress.ip_address(address)
    routes = _routes_v4(root) if target.version == 4 else _routes_v6(root)
    fitting = [(network.prefixlen, -metric, name) for network, metric, name in routes if target in network]
    return max(fitting, default=(0, 0, None))[2]


Route = tuple[ipaddress.IPv4Network | ipaddress.IPv6Network, int, str]


def _rows(file: Path) -> list[list[str]]:
    return [line.split() for line in (read_text(file) or "").splitlines()]


def _routes_v4(root: Path) -> list[Route]:
    """/proc/net/route: interface, destination and mask as little-endian hexadecimal."""
    found: list[Route] = []
    for fields in _rows(root / "proc/net/route")[1:]:
        if len(fields) >= 8 and int(fields[3], 16) & _UP:
            destination, mask = (int.from_bytes(bytes.fromhex(fields[i]), "little") for i in (1, 7))
            network = ipaddress.IPv4Network((destination & mask, mask.bit_count()))
            found.append((network, int(fields[6]), fields[0]))
    return found


def _routes_v6(root: Path) -> list[Route]:
    """/proc/net/ipv6_route: destination, prefix length, source, its length, next hop, metric, ..., interface."""
    found: list[Route] = []
    for fields in _rows(root / "proc/net/ipv6_route"):
        if len(fields) == 10 and int(fields[8], 16) & _UP and fields[9] != "lo":
            network = ipaddress.IPv6Network((int(fields[0], 16), int(fields[1], 16)), strict=False)
            found.append((network, int(fields[5], 16), fields[9]))
    return found
