"""How the supervisor asks the ranks of an attempt to save and stop: by a key in rank 0's store.

Not by a signal: Slurm delivers one to every process of the Slurm step, and network plugins install handlers of
their own in the ranks (train/stop.py). srun passes no real-time signal on, and scancel needs a controller that
answers. Not by a file: a request must also reach ranks whose file system is away. The store is there before the
first collective, whatever the launcher or container, and it keeps the key: a request that comes early waits.

The name of the key ends with a secret of the attempt. It is in the file with the store's address, which only the
owner of the run can read: who merely reaches the port cannot stop the run.

The supervisor does not import torch, so it sends the few bytes of TCPStore's own protocol itself. Rank 0 tries
that on its store before it publishes the address. If a later torch has another protocol the address does not
offer it, and the supervisor falls back to SIGUSR2.
"""

from __future__ import annotations

import contextlib
import json
import secrets
import signal
import socket
import struct
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Protocol

from zslurm.core.files import read_json, write_atomically
from zslurm.core.processes import DetachedProcess
from zslurm.run.run_dir import AttemptDir

KEY = "zslurm/stop"
_TRIAL_KEY = "zslurm/answers"
_TIMEOUT_S = 5.0
_TRIAL_S = 60.0
"""So long the store may take on a busy node: it is not known to be there until it answers."""
_POLL_S = 0.25

# torch/csrc/distributed/c10d/TCPStoreBackend.hpp: a connection begins with VALIDATE and a magic number; ADD takes
# a key (its length first) and a number, and answers with the sum. Numbers are in the machine's byte order.
_VALIDATE, _ADD = 0, 4
_MAGIC = 0x3C85F7CE
_PREFIX = "/"


def add_to_key(host: str, port: int, key: str, timeout_s: float = _TIMEOUT_S) -> bool:
    """Add 1 to a key of a TCPStore; returns whether the store confirmed it."""
    name = (_PREFIX + key).encode("ascii")
    request = struct.pack("=BIBQ", _VALIDATE, _MAGIC, _ADD, len(name)) + name + struct.pack("=q", 1)
    with contextlib.suppress(OSError), socket.create_connection((host, port), timeout_s) as connection:
        connection.settimeout(timeout_s)
        connection.sendall(request)
        answer = connection.recv(8, socket.MSG_WAITALL)
        return len(answer) == 8 and struct.unpack("=q", answer)[0] >= 1
    return False


def address_of(host: str, port: int) -> dict[str, Any]:
    """Return what rank 0 publishes of its store: with a new secret, and whether `add_to_key` works on it."""
    takes_stop = add_to_key(host, port, _TRIAL_KEY, _TRIAL_S)
    return {"host": host, "port": port, "takes_stop": takes_stop, "secret": secrets.token_hex(16)}


def publish(path: Path, address: Mapping[str, Any]) -> None:
    """Write the address of an attempt's store to a file that only its owner can read.

    Raises:
        OSError: it cannot be written.
    """
    write_atomically(path, json.dumps(address) + "\n", private=True)


def stop_key(secret: str) -> str:
    """Return the key of a request to stop; without a secret the key of ranks of a version that had none."""
    return f"{KEY}/{secret}" if secret else KEY


class StopSender:
    """Asks the ranks of one attempt, as often as it takes until the request is known to have arrived."""

    def __init__(self, attempt: AttemptDir, process: DetachedProcess) -> None:
        self._attempt, self._process = attempt, process
        self._address: Mapping[str, Any] | None = None
        self._arrived = False

    def find(self) -> None:
        """Remember the store's address as soon as rank 0 has published it: later the file may be out of reach."""
        if self._address is None:
            with contextlib.suppress(OSError):
                self._address = read_json(self._attempt.rendezvous)

    def send(self) -> bool:
        """Ask once; returns whether the request is in the store. It is not if there is no store yet."""
        self.find()
        if self._arrived or self._address is None:
            return self._arrived
        if not self._address.get("takes_stop"):
            self._process.signal_group(signal.SIGUSR2)
            return False
        port = self._address.get("stop_port", self._address["port"])  # a program has no store: job/program
        key = stop_key(str(self._address.get("secret", "")))
        self._arrived = add_to_key(str(self._address["host"]), int(port), key)
        return self._arrived


class Store(Protocol):
    """The part of torch's Store that is needed here."""

    def check(self, keys: list[str]) -> bool:
        """Return whether the store has all of these keys."""
        ...


class StopListener:
    """A thread of rank 0 that looks for a request in the store; the other ranks learn it in their all-reduce."""

    def __init__(self, store: Store, secret: str, ask: Callable[[], None]) -> None:
        """Begin to look.

        Args:
            store: a client that nothing else uses: each waits for its answers under one lock.
            secret: of the attempt.
            ask: called once, when there is a request.
        """
        self._store, self._key, self._ask = store, stop_key(secret), ask
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._look, name="stop-request", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Look no more. Call it before the store goes."""
        self._over.set()
        self._thread.join(_TIMEOUT_S)

    def _look(self) -> None:
        while not self._over.wait(_POLL_S):
            try:
                if self._store.check([self._key]):
                    self._ask()
                    return
            except RuntimeError:  # torch's DistStoreError and DistNetworkError: the store is in this very process
                return
