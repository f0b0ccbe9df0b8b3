"""`python -m zslurm.job.in_memory.store_server`: the store of an attempt, outside of its ranks: any may die.

The supervisor starts one on the batch host for each attempt with `aegis.recovery: memory` and exchanges lines of
JSON with it (zslurm/job/in_memory/store_client.py is its side). What it sends, to standard input:

    {"op": "generation", "number": 1, "members": ["n0/0", "n1/w0"], "lost": [1], "deadline_s": 10}
    {"op": "move", "number": 1, "members": [...], "lost": [1], "left": ["n1"]}      the same at a step's boundary
    {"op": "stop"}                                                       end

and what it gets, from standard output:

    {"event": "listening", "host": "n0", "port": 40123}                  once
    {"event": "warm", "member": "n1/w0"}                                 a warm process is ready
    {"event": "off", "reason": "..."}                                    the ranks cannot be recovered in memory
    {"event": "boundary", "number": 1, "step": 41}       all ranks hold for a move: the generation is published
    {"event": "unmoved", "number": 1}                    they held for long, and train on: there is no move
    {"event": "recovered", "number": 1, "step": 41, "rolled_back": 0, "seconds": 0.3}
    {"event": "failed", "number": 1, "rank": 1, "reason": "..."}         also at the deadline: who did not come
    {"event": "refused", "number": 1, "reason": "..."}                   a line that is no request, or is too late

With --rendezvous the address is written to a file, in which ranks and the supervisor's request to stop find it,
with the secret that the keys of the store begin with.

When the supervisor dies its store stays, for the ranks train on. The next supervisor connects to the port in the
file of --control, on the same node, sends the token that is there as well, and has the same exchange from then on.
It begins with what happened so far:

    {"event": "adopted", "newest": {...}, "outcome": {...}, "before": {...}, "move": {...}, "unmoved": 0,
     "warm": ["n1/w0"]}

the newest generation and its result, the one before it in which the ranks trained, the move that is planned, the
last move that came to nothing, and every warm process there was; null, 0 or empty if there is none. Without a
supervisor the server ends some time after the step whose process and exit code are in the files of --step is over,
or was killed. Without --step it ends with its standard input.

A request to end an attempt early is another matter: it is a key in the same store, see stop_request.py.
"""

from __future__ import annotations

import argparse
import ctypes
import hmac
import json
import os
import secrets
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict
from functools import partial
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import Any

from zslurm.checkpoint_tools.quantities import counted
from zslurm.core.files import write_atomically
from zslurm.core.processes import DetachedProcess
from zslurm.job.stop_request import address_of, publish
from zslurm.slurm.environment import task_node
from zslurm.train.recovery.generation import (
    NEWEST,
    OFF,
    Generation,
    boundary_key,
    failed,
    generation_key,
    here_key,
    met_key,
    move_key,
    result_key,
    unmoved_key,
    warm_key,
)

_IDLE_S = 0.1
_RECOVERING_S = 0.003
_LONGEST_LINE = 1 << 24
_TOKEN_S = 5.0
_ADOPTED_S = 30.0
"""Seconds after the end of the step in which the next supervisor may come: ranks may run in steps of warm ones."""


def main(argv: list[str] | None = None) -> int:
    """Serve until asked to stop; returns the exit code."""
    parser = argparse.ArgumentParser(prog="zslurm.job.in_memory.store_server", description=__doc__.splitlines()[0])
    parser.add_argument("--host", default=task_node(os.environ) or "127.0.0.1")
    parser.add_argument("--port", type=int, default=0)
    parser.add_argument("--rendezvous", type=Path, help="write the address to this file")
    parser.add_argument("--control", type=Path, help="write port and token for the next supervisor to this file")
    parser.add_argument(
        "--step", type=Path, nargs=2, metavar=("PROCESS", "EXIT"), help="without a supervisor, serve this step"
    )
    options = parser.parse_args(argv)
    signal.signal(signal.SIGPIPE, signal.SIG_IGN)
    for signum in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2, signal.SIGHUP):
        signal.signal(signum, signal.SIG_IGN)  # Slurm sends them to the whole job; they are meant for the ranks
    from torch.distributed import DistNetworkError, PrefixStore, TCPStore

    try:
        number = socket.getaddrinfo(options.host, None, proto=socket.IPPROTO_TCP)[0][4][0]
        look_up_no_names()
        store = TCPStore(str(number), options.port, is_master=True, wait_for_workers=False)
    except (OSError, DistNetworkError) as error:
        print(f"error: store server: {options.host}:{options.port}: {str(error).splitlines()[0]}", file=sys.stderr)
        return 1
    address = address_of(options.host, store.port)
    if options.rendezvous is not None:
        publish(options.rendezvous, address)
    server, requests = StoreServer(PrefixStore(address["secret"], store)), Requests()
    server.emit({"event": "listening", "host": options.host, "port": store.port})
    requests.read(sys.stdin)
    if options.control is not None:
        try:
            requests.listen(options.control)
        except OSError as error:  # the ranks need the store all the same
            print(f"store server: {error.filename or options.control}: {error.strerror}", file=sys.stderr)
    server.serve(requests, Step(*options.step).is_over if options.step else None)
    return 0


class Step:
    """The step that the store is for, as its supervisor has recorded it."""

    def __init__(self, record: Path, exit_file: Path) -> None:
        """Look at these files when asked."""
        self._files = record, exit_file
        self._process: DetachedProcess | None = None

    def is_over(self) -> bool:
        """Return whether it has ended, was killed, or never began; False while the file system does not answer."""
        if self._process is None:
            self._process = DetachedProcess.adopt(*self._files)
        if self._process is not None:
            return self._process.poll() is not None
        try:
            return not self._files[0].exists()
        except OSError:
            return False


def look_up_no_names() -> None:
    """Keep torch's server from asking DNS for the name of each address that connects.

    It does so in the one thread that answers all ranks, to have the name at hand for messages: if DNS is slow
    or away each connection stops the store for seconds, and 1,024 ranks for longer than any of them waits. glibc
    can be asked to take only /etc/hosts, for this process; other C libraries have no such function, and look up
    as before.
    """
    configure = getattr(ctypes.CDLL(None), "__nss_configure_lookup", None)
    if configure is not None:
        configure(b"hosts", b"files")


class Requests:
    """Lines of the supervisor, and of the one that comes after it.

    Attributes:
        lines: as they come; None if a supervisor ends, and if one begins a function that sends it a line.
    """

    def __init__(self) -> None:
        """Take nothing yet."""
        self.lines: SimpleQueue[str | Callable[[str], None] | None] = SimpleQueue()

    def read(self, file: Any) -> None:
        """Take the lines of a file, in a thread."""

        def read() -> None:
            with suppress(OSError):
                while line := file.readline(_LONGEST_LINE):
                    self.lines.put(line)
            self.lines.put(None)

        threading.Thread(target=read, name="requests", daemon=True).start()

    def listen(self, control: Path) -> None:
        """Take the lines of whoever connects from this node with the token in `control`, which is written here.

        Raises:
            OSError: the file cannot be written.
        """
        listener, token = socket.create_server(("127.0.0.1", 0)), secrets.token_hex(16)
        address = {"port": listener.getsockname()[1], "token": token}
        write_atomically(control, json.dumps(address) + "\n", private=True)

        def accept() -> None:
            while True:
                connection, _ = listener.accept()
                connection.settimeout(_TOKEN_S)
                file = connection.makefile("r", encoding="utf-8")
                with suppress(OSError, ValueError):
                    if hmac.compare_digest(file.readline(len(token) + 1).strip().encode(), token.encode()):
                        connection.settimeout(None)
                        self.lines.put(partial(_send_to, connection))
                        self.read(file)
                        continue
                file.close()
                connection.close()

        threading.Thread(target=accept, name="next supervisor", daemon=True).start()


def _send_to(connection: socket.socket, line: str) -> None:
    connection.sendall(f"{line}\n".encode())


def _print(line: str) -> None:
    print(line, flush=True)


class StoreServer:
    """Publishes generations in a store, and reports what their members answer."""

    def __init__(self, store: Any) -> None:
        """Serve with a TCPStore that this process hosts."""
        self._store = store
        self._warm: list[str] = []
        self._off = False
        self._unmoved = 0
        self._supervisors = 1
        self._send: Callable[[str], None] = _print
        self._pending: Generation | None = None
        self._move: Generation | None = None
        self._deadline = 0.0
        self._heard = True
        self._published: Generation | None = None
        self._before: Generation | None = None  # the last one before it in which the ranks trained
        self._outcome: dict[str, Any] | None = None  # of the newest one

    def emit(self, event: dict[str, Any]) -> None:
        """Report an event; once the supervisor is gone, to no one."""
        if self._heard:
            try:
                self._send(json.dumps(event))
            except (OSError, ValueError):
                self._heard = False

    def serve(
        self, requests: Requests, is_over: Callable[[], bool] | None, *, adopted_s: float = _ADOPTED_S
    ) -> None:
        """Answer requests until one of them is to stop, or the supervisor and its step are gone."""
        over_at: float | None = None
        while True:
            pause = _IDLE_S if self._pending is None and self._move is None else _RECOVERING_S
            try:
                line = requests.lines.get(timeout=pause)
            except Empty:
                if self._supervisors == 0 and (is_over is None or is_over()):
                    over_at = over_at or time.monotonic() + (0.0 if is_over is None else adopted_s)
                    if time.monotonic() > over_at:
                        return
            else:
                if line is None:
                    self._supervisors -= 1
                elif not isinstance(line, str):
                    over_at = None
                    self._begin_anew(line)
                elif not self.take(line):
                    return
            self.look()

    def _begin_anew(self, send: Callable[[str], None]) -> None:
        """Serve the next supervisor: from now on only it hears what is new, after what happened so far."""
        self._supervisors += 1
        self._send, self._heard, self._off = send, True, False
        newest, before, move = (
            None if generation is None else asdict(generation)
            for generation in (self._published, self._before, self._move)
        )
        self.emit(
            {
                "event": "adopted", "newest": newest, "outcome": self._outcome, "before": before, "move": move,
                "unmoved": self._unmoved, "warm": self._warm,
            }
        )  # fmt: skip

    def take(self, line: str) -> bool:
        """Act on a request; returns False if it is to stop."""
        try:
            request = json.loads(line)
            operation = request.get("op") if isinstance(request, dict) else None
            if operation == "stop":
                return False
            if operation not in ("generation", "move"):
                raise ValueError(f"expected op to be generation, move or stop, got {json.dumps(operation)}")
            generation = Generation.of(request)
        except ValueError as error:
            self.emit({"event": "refused", "reason": " ".join(str(error).split())})
            return True
        newest = 0 if self._published is None else self._published.number
        if generation.number <= newest:
            why = f"generation {generation.number} is not after {newest}, the newest"
            self.emit({"event": "refused", "number": generation.number, "reason": why})
        elif operation == "move":
            self._move = generation
            self._store.set(move_key(generation.number), "")
        else:
            self._publish(generation)
        return True

    def _publish(self, generation: Generation) -> None:
        if self._outcome is not None and self._outcome["event"] == "recovered":
            self._before = self._published
        if self._pending is not None:
            self._store.set(met_key(self._pending.number), "a further rank was lost")
        self._published, self._outcome = generation, None
        self._pending, self._move = generation, None
        self._deadline = time.monotonic() + generation.deadline_s
        self._store.set(generation_key(generation.number), generation.to_json())
        self._store.set(NEWEST, str(generation.number))

    def look(self) -> None:
        """Report what is new in the store."""
        if not self._off and self._store.check([OFF]):
            self._off = True
            self.emit({"event": "off", "reason": self._store.get(OFF).decode()})
        while self._store.check([warm_key(len(self._warm) + 1)]):
            self._warm.append(self._store.get(warm_key(len(self._warm) + 1)).decode())
            self.emit({"event": "warm", "member": self._warm[-1]})
        if (move := self._move) is not None and self._store.check([boundary_key(move.number)]):
            step = int(self._store.get(boundary_key(move.number)))
            self._publish(move)
            self.emit({"event": "boundary", "number": move.number, "step": step})
        elif move is not None and self._store.check([unmoved_key(move.number)]):
            self._move, self._unmoved = None, move.number
            self.emit({"event": "unmoved", "number": move.number})
        pending = self._pending
        if pending is None:
            return
        if self._store.check([result_key(pending.number)]):
            self._outcome = json.loads(self._store.get(result_key(pending.number)))
            if self._outcome["event"] == "failed":
                self._store.set(met_key(pending.number), self._outcome["reason"])
        elif time.monotonic() > self._deadline:
            self._outcome = self._too_late(pending)
            self._store.set(met_key(pending.number), self._outcome["reason"])
        else:
            return
        self._pending = None
        self.emit(self._outcome)

    def _too_late(self, generation: Generation) -> dict[str, Any]:
        number, limit = generation.number, f"{generation.deadline_s:g} s"
        ranks = range(len(generation.members))
        missing = [rank for rank in ranks if not self._store.check([here_key(number, rank)])]
        if not missing:
            return failed(number, None, f"all ranks came together, but did not train within {limit}")
        shown = ", ".join(map(str, missing[:8])) + (", ..." if len(missing) > 8 else "")
        who = f"{counted(len(missing), 'rank')} ({shown})"
        return failed(number, missing[0], f"{who} did not leave the old generation within {limit}")


if __name__ == "__main__":
    sys.exit(main())
