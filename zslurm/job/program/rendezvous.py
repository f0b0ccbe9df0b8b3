"""The rendezvous of the ranks of a program: rank 0 chooses an address and publishes it for the others.

Rank 0 also opens the stop channel (stop_channel.py) and publishes its port next to the program's own.
"""

from __future__ import annotations

import contextlib
import os
import random
import secrets
import socket
import time
from collections.abc import MutableMapping
from typing import Any

from zslurm.core.files import read_json
from zslurm.job.own_address import rendezvous_host
from zslurm.job.program.stop_channel import StopServer
from zslurm.job.stop_request import publish
from zslurm.run.run_dir import AttemptDir

RENDEZVOUS_TIMEOUT_S = 900.0
_PORTS = range(25_000, 32_000)
"""Below the range from which Linux takes the ports of outgoing connections."""


def free_port(host: str) -> int:
    """Return a port that is free on this address now.

    The search begins at a random port: the program binds it only later, and two runs that start together on one
    node must not choose the same one.

    Raises:
        RuntimeError: no port is free.
    """
    ports = random.sample(_PORTS, len(_PORTS))
    for port in ports:
        with contextlib.suppress(OSError), socket.socket() as probe:
            probe.bind((socket.gethostbyname(host), port))
            return port
    raise RuntimeError(f"no port from {_PORTS.start} to {_PORTS.stop - 1} is free on {host}")


def rendezvous(attempt: AttemptDir, environ: MutableMapping[str, str]) -> tuple[dict[str, Any], StopServer | None]:
    """Set MASTER_ADDR and MASTER_PORT; returns the address, and on rank 0 the server of the stop channel.

    Raises:
        RuntimeError: rank 0 published no address in time, or found no port.
        OSError: the address cannot be written.
    """
    server = None
    if environ["RANK"] == "0":
        host = rendezvous_host(environ)
        secret = secrets.token_hex(16)
        server = StopServer(int(environ["WORLD_SIZE"]), secret, lambda: free_port(host))
        address = {"host": host, "port": free_port(host), "takes_stop": True, "stop_port": server.port}
        publish(attempt.rendezvous, address | {"secret": secret})
    deadline = time.monotonic() + RENDEZVOUS_TIMEOUT_S
    while (published := read_json(attempt.rendezvous)) is None:
        if time.monotonic() > deadline:
            raise RuntimeError(f"{attempt.rendezvous}: rank 0 published no address in {RENDEZVOUS_TIMEOUT_S:g} s")
        time.sleep(0.05)
        os.listdir(attempt.path)  # noqa: PTH208 - makes an NFS client look again
    environ["MASTER_ADDR"], environ["MASTER_PORT"] = str(published["host"]), str(published["port"])
    return published, server
