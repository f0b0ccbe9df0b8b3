"""The supervisor's side of the store server (store_server.py): starts it, and exchanges lines of JSON. No torch.

    store = StoreClient.start([sys.executable], host="n0", attempt=attempt)
    store.wait_until_listening(60)
    store.generation(Generation(1, members, lost=(2,)))
    for event in store.poll(): ...

The server has its own session, so that a supervisor that is killed leaves the ranks their store. Its successor
has no way to talk to that server: it does without recovery in memory until it starts the next attempt.
"""

from __future__ import annotations

import contextlib
import json
import subprocess
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from queue import SimpleQueue
from typing import Any

from zslurm.run.run_dir import AttemptDir
from zslurm.train.recovery.generation import Generation

_ENDS_S = 5.0


class StoreClient:
    """A store server that this process started.

    Attributes:
        port: where it listens; None until it does.
    """

    def __init__(self, process: subprocess.Popen[str]) -> None:
        """Talk to a server whose standard input and output are pipes."""
        self._process = process
        self.port: int | None = None
        self._events: SimpleQueue[dict[str, Any]] = SimpleQueue()
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
            *python, "-u", "-m", "zslurm.job.store_server",
            f"--host={host}", f"--rendezvous={attempt.rendezvous}", f"--until={attempt.step_exit}",
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
        return cls(process)

    @property
    def alive(self) -> bool:
        """Whether the server runs."""
        return self._process.poll() is None

    @property
    def never_listened(self) -> bool:
        """Whether the server ended before ranks could reach it: they would wait for its address for long."""
        return self._over.is_set() and not self._listening.is_set() and not self._stopped

    def wait_until_listening(self, timeout_s: float) -> bool:
        """Wait until ranks can reach the store; returns False where it ended, or took longer."""
        deadline = time.monotonic() + timeout_s
        while not self._listening.wait(0.02):
            if self._over.is_set() or time.monotonic() > deadline:
                return self._listening.is_set()
        return True

    def generation(self, generation: Generation) -> bool:
        """Publish a generation; returns False where the server is gone, and the recovery has failed."""
        return self._send({"op": "generation", **asdict(generation)})

    def move(self, generation: Generation) -> bool:
        """Have a generation published at the next step's boundary; returns False where the server is gone."""
        return self._send({"op": "move", **asdict(generation)})

    def poll(self) -> list[dict[str, Any]]:
        """Return the events since the last call, oldest first; never waits."""
        return [self._events.get() for _ in range(self._events.qsize())]

    def stop(self) -> None:
        """End the server. Call it when the ranks are gone: they lose their store."""
        self._stopped = not self._over.is_set()
        self._send({"op": "stop"})
        try:
            self._process.wait(_ENDS_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        with contextlib.suppress(OSError):
            if self._process.stdin is not None:
                self._process.stdin.close()

    def _send(self, request: dict[str, Any]) -> bool:
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps(request) + "\n")
            self._process.stdin.flush()
        except (OSError, ValueError):
            return False
        return True

    def _read(self) -> None:
        assert self._process.stdout is not None
        with self._process.stdout as lines:
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
                self._events.put(event)
        self._over.set()
