"""The address under which this node hosts what the ranks meet at."""

from __future__ import annotations

import socket
from collections.abc import Mapping

import psutil

from zslurm.slurm.environment import task_node


def rendezvous_host(environ: Mapping[str, str]) -> str:
    """Return the IPv4 address of `cluster.interface`, or else this node's name.

    Raises:
        RuntimeError: there is no such interface with an IPv4 address.
    """
    interface = environ.get("ZSLURM_INTERFACE")
    if interface:
        for address in psutil.net_if_addrs().get(interface, []):
            if address.family == socket.AF_INET:
                return str(address.address)
        raise RuntimeError(f"cluster.interface: no interface `{interface}` with an IPv4 address on this node")
    return task_node(environ) or "127.0.0.1"
