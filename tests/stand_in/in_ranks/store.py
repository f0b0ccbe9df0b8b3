"""The stand-in for torch.distributed: a store in rank 0 through which the ranks also do their collectives.

It takes a request to stop as torch's does (`zslurm.job.stop_request`: VALIDATE, then ADD), so the supervisor sends
it the same bytes. Between stand-ins a connection carries JSON lines. If a rank is lost, its peers get the error
that gloo raises then.
"""

from __future__ import annotations

import json
import socket
import struct
import threading
from collections import defaultdict
from contextlib import suppress
from typing import Any

_VALIDATE, _ADD = 0, 4
_PREFIX = "/"


class TCPStore:
    """A connection to rank 0's store and, in the process that makes it with `is_master`, the store itself."""

    def __init__(self, host: str, port: int, *, is_master: bool = False, wait_for_workers: bool = False) -> None:
        del wait_for_workers
        if is_master:
            _hosted.append(_Server(port))
        self.port = _hosted[-1].port if is_master else port
        self._peer = f"[{host}]:{self.port}"
        self._connection = socket.create_connection((host, self.port))
        self._answers = self._connection.makefile("r")

    def check(self, keys: list[str]) -> bool:
        """Whether all of these keys were added to."""
        return bool(self._ask(keys=keys))

    def join(self, rank: int, size: int) -> None:
        """Be rank `rank` of `size` from now on: others fail if this connection breaks."""
        self._ask(rank=rank, size=size)

    def all_gather(self, value: Any) -> list[Any]:
        """The values of all ranks, once all have come to this call.

        Raises:
            RuntimeError: a rank is lost.
        """
        return list(self._ask(value=value))

    def leave(self) -> None:
        """Go without harm to the others; the store itself goes when all have."""
        with suppress(RuntimeError):
            self._ask(leaves=True)
        self._connection.shutdown(socket.SHUT_RDWR)
        self._connection.close()

    def _ask(self, **question: Any) -> Any:
        try:
            self._connection.sendall(json.dumps(question).encode() + b"\n")
            line = self._answers.readline()
        except OSError:
            line = ""
        answer = json.loads(line) if line else {"error": True}
        if "error" in answer:
            raise RuntimeError(f"[gloo/transport/tcp/pair.cc:534] Connection closed by peer {self._peer}")
        return answer["value"]


def wait_until_left() -> None:
    """In the process that has the store: wait for all ranks to leave, or to be lost."""
    for server in _hosted:
        server.wait_until_left()


class _Server:
    """The store: a thread for each connection."""

    def __init__(self, port: int) -> None:
        self._socket = socket.create_server(("", port), backlog=128)
        self.port: int = self._socket.getsockname()[1]
        self._change = threading.Condition()
        self._keys: dict[str, int] = defaultdict(int)
        self._rounds: list[dict[int, Any]] = []
        self._members: set[int] = set()
        self._lost = False
        threading.Thread(target=self._accept, daemon=True).start()

    def wait_until_left(self) -> None:
        with self._change:
            self._change.wait_for(lambda: not self._members)

    def _accept(self) -> None:
        while True:
            connection, _ = self._socket.accept()
            threading.Thread(target=self._serve, args=(connection,), daemon=True).start()

    def _serve(self, connection: socket.socket) -> None:
        with connection, suppress(OSError, struct.error):
            if connection.recv(1, socket.MSG_PEEK) == bytes([_VALIDATE]):
                self._serve_supervisor(connection)
            else:
                self._serve_rank(connection)

    def _serve_supervisor(self, connection: socket.socket) -> None:
        _, _, operation, length = struct.unpack("=BIBQ", connection.recv(14, socket.MSG_WAITALL))
        key = connection.recv(length, socket.MSG_WAITALL).decode().removeprefix(_PREFIX)
        (number,) = struct.unpack("=q", connection.recv(8, socket.MSG_WAITALL))
        if operation == _ADD:
            with self._change:
                self._keys[key] += number
                connection.sendall(struct.pack("=q", self._keys[key]))

    def _serve_rank(self, connection: socket.socket) -> None:
        rank, size, turn = -1, 0, 0
        try:
            for line in connection.makefile("r"):
                question = json.loads(line)
                answer: dict[str, Any] = {"value": True}
                with self._change:
                    if "keys" in question:
                        answer["value"] = all(key in self._keys for key in question["keys"])
                    elif "rank" in question:
                        rank, size = question["rank"], question["size"]
                        self._members.add(rank)
                    elif "leaves" in question:
                        self._members.discard(rank)
                        self._change.notify_all()
                    else:
                        answer = self._gather(rank, size, turn, question["value"])
                        turn += 1
                connection.sendall(json.dumps(answer).encode() + b"\n")
        finally:
            with self._change:
                if rank in self._members:
                    self._members.remove(rank)
                    self._lost = True
                self._change.notify_all()

    def _gather(self, rank: int, size: int, turn: int, value: Any) -> dict[str, Any]:
        if turn == len(self._rounds):
            self._rounds.append({})
        here = self._rounds[turn]
        here[rank] = value
        self._change.notify_all()
        self._change.wait_for(lambda: len(here) == size or self._lost)
        return {"value": [here[number] for number in range(size)]} if len(here) == size else {"error": True}


_hosted: list[_Server] = []
"""The store of this process, in rank 0."""
