"""How a request to stop reaches the ranks of a program: over TCP, and not by a signal to the step.

Slurm delivers a signal to every process of a step. The program would get SIGUSR2, which ends it, before its rank
could send the signal that it knows. So rank 0 listens for the message that the supervisor sends to the store of
zslurm's own trainer (job/stop_request.py), and passes it on to the ranks that have joined. A rank that got a
signal itself sends the same message: one rank that knows is enough.

Over the same connections the ranks learn of a new generation of a program that recovers (recovery.py): a rank
whose program was lost asks for one, and rank 0 chooses its number and the port where its ranks meet.
"""

from __future__ import annotations

import contextlib
import hmac
import resource
import selectors
import socket
import struct
import threading
from collections.abc import Callable, Mapping
from typing import Any

from zslurm.job.stop_request import add_to_key, stop_key

_JOIN, _STOP, _GENERATION = b"\x01", b"\x02", b"\x03"
_NUMBERS = struct.Struct("=II")
"""What follows _GENERATION: its number, and a port."""
_HEADER = struct.Struct("=BIBQ")
"""Before the key in a request of `add_to_key`: its first byte is 0, unlike _JOIN's."""
_LONGEST = _HEADER.size + 4096
_SPARE_FILES = 256


class StopServer:
    """Rank 0's end: takes requests to stop, and passes them on to all who have joined."""

    def __init__(self, world_size: int, secret: str, choose_port: Callable[[], int]) -> None:
        """Listen on a free port; `world_size` ranks may join, and who knows the secret may ask.

        `choose_port` returns the port of a new generation.

        Raises:
            OSError: no socket can be opened.
        """
        self._key, self._lost_key, self._choose_port = stop_key(secret), _lost_key(secret), choose_port
        self._generation = 0
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        if soft != resource.RLIM_INFINITY and soft < world_size + _SPARE_FILES:
            with contextlib.suppress(ValueError, OSError):
                resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
        self._socket = socket.create_server(("", 0), backlog=1024)
        self._socket.setblocking(False)
        self.port: int = self._socket.getsockname()[1]
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._socket, selectors.EVENT_READ)
        self._read: dict[socket.socket, bytes] = {}
        self._joined: set[socket.socket] = set()
        self._requests = 0
        threading.Thread(target=self._serve, name="stop-channel", daemon=True).start()

    def _serve(self) -> None:
        while True:
            for key, _ in self._selector.select():
                if key.fileobj is self._socket:
                    self._accept()
                else:
                    self._receive(key.fileobj)  # type: ignore[arg-type]

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            connection, _ = self._socket.accept()
            connection.setblocking(False)
            self._read[connection] = b""
            self._selector.register(connection, selectors.EVENT_READ)

    def _receive(self, connection: socket.socket) -> None:
        try:
            data = connection.recv(4096)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        read = self._read[connection] = self._read[connection] + data
        if not data or len(read) > _LONGEST:
            self._forget(connection)
        elif read.startswith(_JOIN):
            self._joined.add(connection)
            if self._requests:
                self._send(connection, _STOP)
        elif (key := _requested(read)) is not None:
            self._read[connection] = b""
            if hmac.compare_digest(key.encode(), self._lost_key.encode()):
                self._begin_generation()
            elif hmac.compare_digest(key.encode(), self._key.encode()):
                self._requests += 1
                for peer in list(self._joined):
                    self._send(peer, _STOP)
            else:
                self._forget(connection)
                return
            self._send(connection, struct.pack("=q", 1))

    def _begin_generation(self) -> None:
        try:
            port = self._choose_port()
        except RuntimeError:  # none is free: the rank waits in vain, and ends with its program
            return
        self._generation += 1
        for peer in list(self._joined):
            self._send(peer, _GENERATION + _NUMBERS.pack(self._generation, port))

    def _send(self, connection: socket.socket, message: bytes) -> None:
        try:
            connection.sendall(message)
        except OSError:
            self._forget(connection)

    def _forget(self, connection: socket.socket) -> None:
        self._joined.discard(connection)
        if self._read.pop(connection, None) is not None:
            self._selector.unregister(connection)
            connection.close()


def _requested(read: bytes) -> str | None:
    """Return the key of a whole request, without the prefix that torch puts before it; None of part of one."""
    if len(read) < _HEADER.size:
        return None
    length = _HEADER.unpack_from(read)[3]
    if len(read) < _HEADER.size + length + 8:
        return None
    return read[_HEADER.size : _HEADER.size + length].decode("ascii", "replace").removeprefix("/")


def _lost_key(secret: str) -> str:
    return f"zslurm/lost/{secret}"


def join(
    address: Mapping[str, Any],
    ask: Callable[[], None],
    on_generation: Callable[[int, int], None] = lambda _number, _port: None,
) -> None:
    """Call `ask` in a thread as soon as a request to stop arrives at rank 0, and `on_generation` for generations.

    If rank 0 cannot be reached, or has ended, no request comes: the supervisor then ends the step when its
    limit (aegis.save_s) is over.
    """

    def listen() -> None:
        with contextlib.suppress(OSError), _connection(address) as connection:
            connection.settimeout(None)
            connection.sendall(_JOIN)
            while (message := connection.recv(1)) == _GENERATION:
                on_generation(*_NUMBERS.unpack(connection.recv(_NUMBERS.size, socket.MSG_WAITALL)))
            if message == _STOP:
                ask()

    threading.Thread(target=listen, name="stop-request", daemon=True).start()


def pass_on(address: Mapping[str, Any]) -> bool:
    """Send a request that reached only this rank to all others; returns whether rank 0 has it."""
    return add_to_key(str(address["host"]), int(address["stop_port"]), stop_key(str(address.get("secret", ""))))


def report_lost(address: Mapping[str, Any]) -> bool:
    """Ask for a new generation, because this rank's program is lost; returns whether rank 0 has the request."""
    return add_to_key(str(address["host"]), int(address["stop_port"]), _lost_key(str(address.get("secret", ""))))


def _connection(address: Mapping[str, Any]) -> socket.socket:
    return socket.create_connection((str(address["host"]), int(address["stop_port"])), timeout=60.0)
