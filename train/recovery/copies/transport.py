"""Frames between two ranks: a state of many bytes, its step, and the CRC32 of all of it.

    token    of the receiver, once for each connection
    header   kind, generation, step, bytes of meta, bytes of state      little-endian
    meta     JSON
    state    bytes, straight from and into the buffers of the caller
    crc      CRC32 of the state, and of meta
    answer   the step if it arrived whole, else -1

Plain TCP of the host, so that nothing here depends on the groups that a fault breaks. Sending, receiving and the
CRC32 leave the trainer its GIL.
"""

from __future__ import annotations

import hmac
import secrets
import socket
import struct
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass

from zslurm.checkpoint_tools.checksum import crc32

Address = tuple[str, int, str]
"""Host and port of a rank, and the token without which it takes nothing; ranks learn it over their group."""

COPY, RESTORE = 1, 2
_TOKEN_BYTES = 16
_HEADER = struct.Struct("<4sBIqQQ")
_CRCS = struct.Struct("<II")
_ANSWER = struct.Struct("<q")
_MAGIC = b"ZRC1"
_PIECE = 4 << 20
_MOST_META = 1 << 30
_CONNECT_S = 5.0


@dataclass(frozen=True)
class Frame:
    """What precedes a state."""

    kind: int
    generation: int
    step: int
    meta: bytes
    size: int = 0  # bytes of the state, once received


def listen(host: str) -> socket.socket:
    """Return a socket that listens at a free port of an address."""
    return socket.create_server((host, 0), backlog=64)


def new_token() -> str:
    """Return a token that cannot be guessed."""
    return secrets.token_hex(_TOKEN_BYTES)


class Link:
    """A connection to another rank."""

    def __init__(self, connection: socket.socket) -> None:
        """Take a connection, which is closed with this."""
        self._socket = connection
        self._socket.settimeout(None)
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)

    @classmethod
    def to(cls, address: Address) -> Link:
        """Connect to a rank.

        Raises:
            OSError: it does not answer.
        """
        host, port, token = address
        link = cls(socket.create_connection((host, port), _CONNECT_S))
        link._socket.sendall(bytes.fromhex(token))
        return link

    def admits(self, token: str) -> bool:
        """Return whether the other end begins with this token; one that sends nothing is not waited for.

        Raises:
            OSError: it sends nothing.
        """
        self._socket.settimeout(_CONNECT_S)
        token_given = bytes(self._exactly(_TOKEN_BYTES))
        self._socket.settimeout(None)
        return hmac.compare_digest(token_given, bytes.fromhex(token))

    def send(self, frame: Frame, parts: Sequence[memoryview]) -> int:
        """Send a state; returns its CRC32.

        Raises:
            OSError: the other end is gone.
        """
        size = sum(part.nbytes for part in parts)
        header = _HEADER.pack(_MAGIC, frame.kind, frame.generation, frame.step, len(frame.meta), size)
        self._socket.sendall(header + frame.meta)
        crc = 0
        for part in parts:
            for start in range(0, part.nbytes, _PIECE):
                piece = part[start : start + _PIECE]
                crc = crc32(piece, crc)
                self._socket.sendall(piece)
        self._socket.sendall(_CRCS.pack(crc, crc32(frame.meta)))
        return crc

    def frame(self) -> Frame:
        """Receive what precedes a state.

        Raises:
            OSError: the other end is gone.
            ValueError: it is no rank.
        """
        magic, kind, generation, step, meta_size, size = _HEADER.unpack(self._exactly(_HEADER.size))
        if magic != _MAGIC or meta_size > _MOST_META:
            raise ValueError("no frame")
        return Frame(kind, generation, step, bytes(self._exactly(meta_size)), size)

    def take(self, parts: Sequence[memoryview], frame: Frame) -> tuple[bool, int]:
        """Receive a state into buffers of its size; returns whether it is right, and its CRC32."""
        crc = 0
        for part in parts:
            for start in range(0, part.nbytes, _PIECE):
                piece = part[start : start + _PIECE]
                self._into(piece)
                crc = crc32(piece, crc)
        expected = _CRCS.unpack(self._exactly(_CRCS.size))
        return expected == (crc, crc32(frame.meta)), crc

    def reply(self, step: int) -> None:
        """Answer a frame."""
        self._socket.sendall(_ANSWER.pack(step))

    def answer(self) -> int:
        """Receive the answer."""
        return int(_ANSWER.unpack(self._exactly(_ANSWER.size))[0])

    def cut(self) -> None:
        """Let whatever waits on it raise; it is closed by its owner."""
        with suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Close it; whatever waits on it raises."""
        self.cut()
        self._socket.close()

    def _exactly(self, size: int) -> bytearray:
        buffer = bytearray(size)
        self._into(memoryview(buffer))
        return buffer

    def _into(self, view: memoryview) -> None:
        while view:
            count = self._socket.recv_into(view)
            if not count:
                raise ConnectionError("the connection was closed")
            view = view[count:]
