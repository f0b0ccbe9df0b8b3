"""The supervisor's side of the store server (store_server.py): starts it, and exchanges lines of JSON. No torch.

    store = StoreClient.start([sys.executable], host="n0", attempt=attempt)
    store.wait_until_listening(60)
    store.generation(Generation(1, members, lost=(2,)))
    for event in store.poll(): ...

The server has its own session, so that a supervisor that is killed leaves the ranks their store. The next one
finds the server by the file that it has left in the attempt's directory:

    store = StoreClient.adopt(attempt)
    store.taken_over(5)["newest"]
"""

from __future__ import annotations

import contextlib
import errno
import json
import socket
import subprocess
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from queue import SimpleQueue
from typing import IO, Any

from zslurm.core.files import read_json
from zslurm.run.run_dir import AttemptDir
from zslurm.train.recovery.generation import Generation

_ENDS_S = 5.0
_CONNECT_S = 5.0


class StoreClient:
    """A store server that this process, or a supervisor before it, has started.

    Attributes:
        port: the one that it listens on; None until it does, and if another supervisor has started it.
    """

    def __init__(self, read: IO[str], write: IO[str], process: subprocess.Popen[str] | None = None) -> None:
        """Talk to a server over two files; `process` is a child of this process."""
        self._process, self._lines, self._requests = process, read, write
        self.port: int | None = None
        self._events: SimpleQueue[dict[str, Any]] = SimpleQueue()
        self._adopted: dict[str, Any] = {}
        self._listening = threading.Event()
        self._over = threading.Event()
        self._stopped = False
        threading.Thread(target=self._read, name="store events", daemon=True).start()

    @classmethod
    def start(
        cls,
        python: Sequence[str],
        *,
        host: str,
        attempt: AttemptDir,
        environ: Mapping[str, str] | None = None,
        log: Path | None = None,
    ) -> StoreClient:
        """Start a server for an attempt; `python` is the command of an interpreter that has torch.

        `host` is this node's name as the ranks reach it, `log` a file for what the server has to complain about.

        Raises:
            OSError: it cannot be started.
        """
        command = [
            *python, "-u", "-m", "zslurm.job.in_memory.store_server",
            f"--host={host}", f"--rendezvous={attempt.rendezvous}", f"--control={attempt.store_control}",
            "--step", str(attempt.step_process), str(attempt.step_exit),
        ]  # fmt: skip
        with contextlib.ExitStack() as files:
            errors = files.enter_context(log.open("ab")) if log is not None else subprocess.DEVNULL
            process = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
                env=dict(environ) if environ is not None else None,
                start_new_session=True,
            )
        assert process.stdin is not None and process.stdout is not None
        return cls(process.stdout, process.stdin, process)

    @classmethod
    def adopt(cls, attempt: AttemptDir) -> StoreClient:
        """Connect to the server of an attempt that a supervisor has started which is gone.

        Raises:
            OSError: there is none, or it does not answer.
        """
        control = read_json(attempt.store_control) or {}
        port, token = control.get("port"), control.get("token")
        if not isinstance(port, int) or not isinstance(token, str):
            problem = "its store server has left no address"
            raise FileNotFoundError(errno.ENOENT, problem, str(attempt.store_control))
        connection = socket.create_connection(("127.0.0.1", port), _CONNECT_S)
        connection.settimeout(None)
        connection.sendall(f"{token}\n".encode())
        client = cls(connection.makefile("r", encoding="utf-8"), connection.makefile("w", encoding="utf-8"))
        client._listening.set()
        return client

    def taken_over(self, timeout_s: float) -> dict[str, Any] | None:
        """Return what an adopted server reports of the time before (store_server.py); None if it does not."""
        deadline = time.monotonic() + timeout_s
        while not self._adopted and not self._over.wait(0.005) and time.monotonic() < deadline:
            pass
        return self._adopted or None

    @property
    def has_ended(self) -> bool:
        """Whether the server has ended though it was not stopped, and all that it reported was taken."""
        return self._over.is_set() and self._events.empty() and not self._stopped

    @property
    def never_listened(self) -> bool:
        """Whether the server ended before ranks could reach it: they would wait for its address for long."""
        return self._over.is_set() and not self._listening.is_set() and not self._stopped

    def wait_until_listening(self, timeout_s: float) -> bool:
        """Wait until ranks can reach the store; returns False if it ended, or took longer."""
        deadline = time.monotonic() + timeout_s
        while not self._listening.wait(0.02):
            if self._over.is_set() or time.monotonic() > deadline:
                return self._listening.is_set()
        return True

    def generation(self, generation: Generation) -> bool:
        """Publish a generation; returns False if the server is gone, and the recovery has failed."""
        return self._send({"op": "generation", **asdict(generation)})

    def move(self, generation: Generation) -> bool:
        """Have a generation published at the next step's boundary; returns False if the server is gone."""
        return self._send({"op": "move", **asdict(generation)})

    def poll(self) -> list[dict[str, Any]]:
        """Return the events since the last call, oldest first; never waits."""
        return [self._events.get() for _ in range(self._events.qsize())]

    def stop(self) -> None:
        """End the server. Call it when the ranks are gone: they lose their store."""
        self._stopped = not self._over.is_set()
        self._send({"op": "stop"})
        if self._process is None:
            self._over.wait(_ENDS_S)
        else:
            try:
                self._process.wait(_ENDS_S)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait()
        with contextlib.suppress(OSError):
            self._requests.close()

    def _send(self, request: dict[str, Any]) -> bool:
        try:
            self._requests.write(json.dumps(request) + "\n")
            self._requests.flush()
        except (OSError, ValueError):
            return False
        return True

    def _read(self) -> None:
        with self._lines as lines, contextlib.suppress(OSError):
            for line in lines:
                try:
                    event = json.loads(line)
                except ValueError:  # a library's own output
                    continue
                if not isinstance(event, dict):
                    continue
                if event.get("event") == "listening":
                    self.port = int(event["port"])
                    self._listening.set()
                if event.get("event") == "adopted":
                    self._adopted = event
                else:
                    self._events.put(event)
        self._over.set()
