"""Leave a collective whose peers are gone, from another thread of the process.

gloo     has no call for it (pytorch/pytorch#130345): an operation waits for its whole timeout, and only the ring's
         neighbours of a dead rank notice at once. Here the sockets that gloo opened are shut down: whatever waits
         on one of them raises, and so does every other wait for one of its operations (waits.py). They are those
         that appeared while a group was made; never the store's, nor those of the copies, which are told apart by
         their ports.
NCCL     `_abort_process_group` aborts all communicators in one group call. Known to crash are NCCL 2.28.3 to
         2.28.8 (so ROCm 7.11 to 7.13, whose RCCL is 2.28.3): refused, with the version.

Cost: two looks at /proc/self/fd for each set of groups that is made.
"""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import torch

from zslurm.train.parallel.store_connections import CONNECTIONS, sockets
from zslurm.train.recovery.waits import WAITS

UNTRIED = "it has not been tried on GPUs yet; aegis.recovery: memory allows it"
_CRASHES = ((2, 28, 3), (2, 28, 8))
NCCL_VARIABLES = {
    "TORCH_NCCL_ASYNC_ERROR_HANDLING": "0",
    "TORCH_NCCL_RETHROW_CUDA_ERRORS": "0",
    "TORCH_NCCL_PROPAGATE_ERROR": "0",
}
"""Set before the first group is made, so that torch does not end the process for a peer that is gone."""


def why_not(device: torch.device, *, untried: bool) -> str | None:
    """Return why collectives of this device cannot be aborted in a living process; None if they can.

    Args:
        device: of this process.
        untried: whether to try it where nobody has.
    """
    if device.type == "cpu":
        return None
    if not untried:
        return UNTRIED
    return crashes(tuple(int(digit) for digit in torch.cuda.nccl.version()[:3]))


def crashes(version: tuple[int, ...]) -> str | None:
    """Return why a version of NCCL or RCCL is refused; None if it is fine."""
    if _CRASHES[0] <= version <= _CRASHES[1]:
        return f"NCCL {'.'.join(map(str, version))} crashes when it is aborted (2.28.3 to 2.28.8 do)"
    return None


class Abort:
    """Ends the collectives of this process, in whatever thread they wait."""

    def __init__(self, device: torch.device, *, other_ports: set[int]) -> None:
        """Prepare; sockets to or from `other_ports` (the store's, the copies') are not closed."""
        self._on_gpu, self._other_ports = device.type == "cuda", other_ports
        self._lock = threading.Lock()
        self._groups: dict[int, str] = {}  # gloo's sockets, as descriptor and inode
        self._before: dict[int, str] | None = None  # what was open before the groups that are being made
        self._stores: dict[int, str] = {}  # connections to the store that only these groups use
        if not self._on_gpu:
            WAITS.install()

    def add_port(self, port: int) -> None:
        """Close no connections to or from this port."""
        self._other_ports.add(port)

    @contextmanager
    def making_groups(self) -> Iterator[None]:
        """Note the sockets that are opened in the block as sockets of groups."""
        WAITS.resume()
        with self._lock:
            self._before = sockets()
        try:
            yield
        finally:
            with self._lock:
                self._groups |= self._new()
                self._before = None

    def made(self) -> None:
        """Close no connections to the store again: all groups are there."""
        with self._lock:
            self._stores = {}
        WAITS.drop_groups()

    @contextmanager
    def connecting(self) -> Iterator[None]:
        """Note the connections opened in the block: cut until groups are `made`, if a peer may never appear."""
        before = sockets()
        with CONNECTIONS.noting() as taken:
            yield
        with self._lock:
            new = {fd: inode for fd, inode in sockets().items() if before.get(fd) != inode}
            self._stores = new | taken

    def __call__(self) -> None:
        """Abort; from any thread, as often as one likes."""
        WAITS.abort()
        if self._on_gpu:
            from torch.distributed.distributed_c10d import _abort_process_group

            with suppress(RuntimeError, ValueError, AssertionError):  # there is none, not yet or not any more
                _abort_process_group()
        with self._lock:
            descriptors = self._groups | self._new() | self._stores
            self._groups = {}
        for descriptor, inode in descriptors.items():
            _shut_down(descriptor, inode)

    def _new(self) -> dict[int, str]:
        if self._before is None:
            return {}
        before = self._before
        return {
            descriptor: inode
            for descriptor, inode in sockets().items()
            if before.get(descriptor) != inode and not self._is_other(descriptor)
        }

    def _is_other(self, descriptor: int) -> bool:
        with suppress(OSError), socket.socket(fileno=os.dup(descriptor)) as duplicate:
            if duplicate.type != socket.SOCK_STREAM or duplicate.family not in (socket.AF_INET, socket.AF_INET6):
                return True
            if duplicate.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
                return True  # gloo ends the process where its listener fails, and nothing waits on that
            ports = {duplicate.getsockname()[1]}
            with suppress(OSError):  # it is not connected yet
                ports.add(duplicate.getpeername()[1])
            return bool(ports & self._other_ports)
        return True


def leave_groups() -> None:
    """Drop all groups of this process; what waited in them has raised."""
    with suppress(RuntimeError):  # an aborted communicator may complain
        WAITS.leave_groups()


def _shut_down(descriptor: int, inode: str) -> None:
    """Shut a socket down if the descriptor still is that socket."""
    with suppress(OSError), socket.socket(fileno=os.dup(descriptor)) as duplicate:
        if str(Path(f"/proc/self/fd/{duplicate.fileno()}").readlink()) == inode:
            duplicate.shutdown(socket.SHUT_RDWR)
