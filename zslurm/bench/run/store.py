"""Host the store at which the ranks of a benchmark meet: next to rank 0, in a separate process.

torch's store works in a thread of the process that hosts it. In rank 0 that thread would compete with what is
measured there, and its processor time would count as rank 0's. Ranks on CPUs are compared by that: on links that
are slow for all, the store by itself made rank 0 a tenth slower than its peers.
"""

from __future__ import annotations

import json
import os
import socket
import warnings
from typing import NoReturn

import torch.distributed as dist

from zslurm.job.in_memory.store_server import look_up_no_names


class StoreNotStarted(Exception):
    """The store could not be started; the message is a line with the reason."""


def host_store(host: str) -> int:
    """Start the store on this node; it ends with this process. Returns its port.

    Args:
        host: name or address of this node that the store is reached by.

    Raises:
        StoreNotStarted: it cannot listen, or the host is not known.
    """
    answer, to_parent = os.pipe()
    life, of_parent = os.pipe()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # other threads hold no lock that the child takes
        child = os.fork()
    if not child:
        os.close(of_parent)
        _serve(host, to_parent, life)
    os.close(to_parent)
    os.close(life)
    with os.fdopen(answer) as pipe:
        started = json.loads(pipe.read() or '{"why": "its process ended"}')
    if "port" not in started:
        raise StoreNotStarted(f"the store on {host} did not start: {started['why']}")
    return int(started["port"])


def _serve(host: str, to_parent: int, life: int) -> NoReturn:
    """Host the store until the parent, which holds the other end of `life`, has ended."""
    try:
        nowhere = os.open(os.devnull, os.O_RDWR)
        for standard in range(3):  # the parent's pipes must end with the parent
            os.dup2(nowhere, standard)
        try:
            address = socket.getaddrinfo(host, None, proto=socket.IPPROTO_TCP)[0][4][0]
            look_up_no_names()
            store = dist.TCPStore(str(address), 0, is_master=True, wait_for_workers=False)
            started: dict[str, str | int] = {"port": store.port}
        except (OSError, dist.DistNetworkError) as error:
            started = {"why": str(error).splitlines()[0]}
        os.write(to_parent, json.dumps(started).encode())
        os.close(to_parent)
        if "port" in started:
            os.read(life, 1)
    finally:
        os._exit(0)
