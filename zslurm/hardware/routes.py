"""The addresses of a name, the time of a reverse look-up, and the interface by which an address is reached."""

from __future__ import annotations

import ipaddress
import socket
import threading
import time
from contextlib import suppress
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
        rows = socket.getaddrinfo(name, None, proto=socket.IPPROTO_TCP)
    except (OSError, UnicodeError):
        return []
    return list(dict.fromkeys(str(entry[4][0]) for entry in rows))


def reverse_lookup_s(address: str, limit_s: float) -> float:
    """Return how long the look-up of an address's name takes, found or not; `limit_s` if it takes longer.

    An IPv4 address is looked up in the form that it has for a server that takes IPv6 too, as torch's store: in
    this form /etc/hosts never has it, so DNS is asked.
    """
    mapped = f"::ffff:{address}" if ipaddress.ip_address(address).version == 4 else address

    def look_up() -> None:
        with suppress(OSError):
            socket.getnameinfo((mapped, 0), socket.NI_NUMERICSERV)

    began = time.monotonic()
    thread = threading.Thread(target=look_up, name="reverse look-up", daemon=True)  # it cannot be interrupted
    thread.start()
    thread.join(limit_s)
    return limit_s if thread.is_alive() else time.monotonic() - began


def interface_to(address: str, root: Path) -> str | None:
    """Return the interface of the most specific route to an address; None if there is none, or it is not known."""
    target = ipaddress.ip_address(address)
    routes = _routes_v4(root) if target.version == 4 else _routes_v6(root)
    fitting = [(network.prefixlen, -metric, name) for network, metric, name in routes if target in network]
    return max(fitting, default=(0, 0, None))[2]


Route = tuple[ipaddress.IPv4Network | ipaddress.IPv6Network, int, str]


def _rows(file: Path) -> list[list[str]]:
    return [line.split() for line in (read_text(file) or "").splitlines()]


def _routes_v4(root: Path) -> list[Route]:
    """/proc/net/route: interface, destination and mask as little-endian hexadecimal."""
    routes: list[Route] = []
    for fields in _rows(root / "proc/net/route")[1:]:
        if len(fields) >= 8 and int(fields[3], 16) & _UP:
            destination, mask = (int.from_bytes(bytes.fromhex(fields[i]), "little") for i in (1, 7))
            network = ipaddress.IPv4Network((destination & mask, mask.bit_count()))
            routes.append((network, int(fields[6]), fields[0]))
    return routes


def _routes_v6(root: Path) -> list[Route]:
    """/proc/net/ipv6_route: destination, prefix length, source, its length, next hop, metric, ..., interface."""
    routes: list[Route] = []
    for fields in _rows(root / "proc/net/ipv6_route"):
        if len(fields) == 10 and int(fields[8], 16) & _UP and fields[9] != "lo":
            network = ipaddress.IPv6Network((int(fields[0], 16), int(fields[1], 16)), strict=False)
            routes.append((network, int(fields[5], 16), fields[9]))
    return routes
