"""Connections to the store that are opened before they are needed.

torch looks the name of an address up for every connection that a TCPStore opens (`formatSockAddr` in
c10d/socket.cpp), whether it logs it or not. A name server that loses a packet costs 5 s then, half of what a
recovery in memory may take, and a thousand ranks ask it at once. So connections for the next generation are opened
in the background, and while a warm process waits. One that was cut is replaced when it is taken.
"""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from pathlib import Path

import torch.distributed as dist

_CONNECT_TIMEOUT = timedelta(seconds=60)

Sockets = dict[int, str]
"""Descriptors of this process, and the inodes that they are."""


class StoreConnections:
    """The connections of this process that are ready."""

    def __init__(self) -> None:
        """Keep none."""
        self._lock, self._opening = threading.Lock(), threading.Lock()
        self._ready: list[tuple[dist.TCPStore, Sockets]] = []
        self._address: tuple[str, int] | None = None
        self._count = 0
        self._noted: Sockets = {}

    def keep(self, host: str, port: int, count: int) -> None:
        """Have a number of connections ready from now on; `refill` opens those that were taken."""
        self._address, self._count = (host, port), count
        self.refill()

    def refill(self) -> None:
        """Open in the background what is missing."""
        if self._count:
            threading.Thread(target=self._open_missing, name="store connections", daemon=True).start()

    def take(self, host: str, port: int, timeout: timedelta) -> dist.TCPStore:
        """Return a connection that nothing else uses.

        Raises:
            RuntimeError: the store does not answer.
        """
        while True:
            with self._lock:
                if self._address != (host, port) or not self._ready:
                    break
                store, sockets = self._ready.pop()
            with suppress(RuntimeError):  # it was cut, and another one is taken
                store.set_timeout(timeout)
                store.num_keys()
                self._noted |= sockets
                return store
        return dist.TCPStore(host, port, is_master=False, wait_for_workers=False, timeout=timeout)

    @contextmanager
    def noting(self) -> Iterator[Sockets]:
        """Note the sockets of connections that are taken in the block."""
        new_sockets: Sockets = {}
        self._noted = new_sockets
        yield new_sockets

    def _open_missing(self) -> None:
        with self._opening:
            while self._address is not None and len(self._ready) < self._count:
                host, port = self._address
                before = sockets()
                try:
                    store = dist.TCPStore(
                        host, port, is_master=False, wait_for_workers=False, timeout=_CONNECT_TIMEOUT
                    )
                except RuntimeError:  # it is gone, or does not answer: whoever needs a connection finds out
                    return
                new = {fd: inode for fd, inode in sockets().items() if before.get(fd) != inode}
                own_sockets = {fd: inode for fd, inode in new.items() if _is_to(fd, port)}
                with self._lock:
                    self._ready.append((store, own_sockets))


def sockets() -> Sockets:
    """Return the sockets that this process has open."""
    links = {}
    for path in Path("/proc/self/fd").iterdir():
        with suppress(OSError):
            target = str(path.readlink())
            if target.startswith("socket:"):
                links[int(path.name)] = target
    return links


def _is_to(descriptor: int, port: int) -> bool:
    with suppress(OSError, IndexError), socket.socket(fileno=os.dup(descriptor)) as duplicate:
        return bool(duplicate.getpeername()[1] == port)
    return False


CONNECTIONS = StoreConnections()
"""Of this process, which is one rank."""
