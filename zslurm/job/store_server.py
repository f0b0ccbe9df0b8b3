"""`python -m zslurm.job.store_server`: the store of one attempt, outside of its ranks: any of them may die.

The supervisor starts one on the batch host for each attempt with `aegis.recovery: memory` and exchanges lines of
JSON with it (zslurm/job/store_client.py is its side). What it sends, to standard input:

    {"op": "generation", "number": 1, "members": ["n0/0", "n1/w0"], "lost": [1], "deadline_s": 10}
    {"op": "move", "number": 1, "members": [...], "lost": [1], "left": ["n1"]}      the same at a step's boundary
    {"op": "stop"}                                                       end

and what it gets, from standard output:

    {"event": "listening", "host": "n0", "port": 40123}                  once
    {"event": "warm", "member": "n1/w0"}                                 a warm process is ready
    {"event": "boundary", "number": 1, "step": 41}       all ranks hold for a move: the generation is published
    {"event": "recovered", "number": 1, "step": 41, "rolled_back": 0, "seconds": 0.3}
    {"event": "failed", "number": 1, "rank": 1, "reason": "..."}         also at the deadline: who did not come
    {"event": "refused", "number": 1, "reason": "..."}                   a line that is no request, or is too late

With --rendezvous the address is written to a file, where ranks and the supervisor's request to stop find it. When
the supervisor dies its store stays, for the ranks train on: then the server ends once the file of --until exists,
which the step leaves when it is over. Without --until it ends with its standard input.

A request to end an attempt early is another matter: it is a key in the same store, see stop_request.py.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import socket
import sys
import threading
import time
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import Any

from zslurm.checkpoint_tools.quantities import counted
from zslurm.core.files import write_atomically
from zslurm.job.stop_request import address_of
from zslurm.train.recovery.generation import (
    NEWEST,
    Generation,
    boundary_key,
    failed,
    generation_key,
    here_key,
    move_key,
    result_key,
    warm_key,
)

_IDLE_S = 0.1
_RECOVERING_S = 0.003
_LONGEST_LINE = 1 << 24


def main(argv: list[str] | None = None) -> int:
    """Serve until asked to stop; returns the exit code."""
    parser = argparse.ArgumentParser(prog="zslurm.job.store_server", description=__doc__.splitlines()[0])
    parser.add_argument("--host", default=os.environ.get("SLURMD_NODENAME", "127.0.0.1"))
    parser.add_argument("--port", type=int, default=0)
    parser.add_argument("--rendezvous", type=Path, help="write the address to this file")
    parser.add_argument("--until", type=Path, help="after the end of standard input, serve until this file exists")
    options = parser.parse_args(argv)
    signal.signal(signal.SIGPIPE, signal.SIG_IGN)
    for signum in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2, signal.SIGHUP):
        signal.signal(signum, signal.SIG_IGN)  # Slurm sends them to the whole job; they are meant for the ranks
    from torch.distributed import DistNetworkError, TCPStore

    try:
        socket.getaddrinfo(options.host, None)
        store = TCPStore(options.host, options.port, is_master=True, wait_for_workers=False)
    except (OSError, DistNetworkError) as error:
        print(f"error: store server: {options.host}:{options.port}: {str(error).splitlines()[0]}", file=sys.stderr)
        return 1
    if options.rendezvous is not None:
        write_atomically(options.rendezvous, json.dumps(address_of(options.host, store.port)) + "\n")
    server = StoreServer(store)
    server.emit({"event": "listening", "host": options.host, "port": store.port})
    server.serve(_lines_of_stdin(), options.until)
    return 0


def _lines_of_stdin() -> SimpleQueue[str | None]:
    """Return the lines as they come; None at the end."""
    lines: SimpleQueue[str | None] = SimpleQueue()

    def read() -> None:
        while line := sys.stdin.readline(_LONGEST_LINE):
            lines.put(line)
        lines.put(None)

    threading.Thread(target=read, name="requests", daemon=True).start()
    return lines


class StoreServer:
    """Publishes generations in a store, and reports what their members answer."""

    def __init__(self, store: Any) -> None:
        """Serve with a TCPStore that this process hosts."""
        self._store = store
        self._warm = 0
        self._pending: Generation | None = None
        self._move: Generation | None = None
        self._deadline = 0.0
        self._newest = 0
        self._heard = True

    def emit(self, event: dict[str, Any]) -> None:
        """Report an event; once the supervisor is gone, to no one."""
        if self._heard:
            try:
                print(json.dumps(event), flush=True)
            except OSError:
                self._heard = False

    def serve(self, lines: SimpleQueue[str | None], until: Path | None) -> None:
        """Answer requests until one of them is to stop, or the supervisor and its step are gone."""
        listening = True
        while True:
            pause = _IDLE_S if self._pending is None and self._move is None else _RECOVERING_S
            try:
                line = lines.get(timeout=pause)
            except Empty:
                if not listening and (until is None or until.exists()):
                    return
            else:
                if line is None:
                    listening, self._move = False, None  # its ranks train on; who would know where they are?
                elif not self.take(line):
                    return
            self.look()

    def take(self, line: str) -> bool:
        """Act on a request; returns False where it is to stop."""
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
        if generation.number <= self._newest:
            why = f"generation {generation.number} is not after {self._newest}, the newest"
            self.emit({"event": "refused", "number": generation.number, "reason": why})
        elif operation == "move":
            self._move = generation
            self._store.set(move_key(generation.number), "")
        else:
            self._publish(generation)
        return True

    def _publish(self, generation: Generation) -> None:
        self._newest, self._pending, self._move = generation.number, generation, None
        self._deadline = time.monotonic() + generation.deadline_s
        self._store.set(generation_key(generation.number), generation.to_json())
        self._store.set(NEWEST, str(generation.number))

    def look(self) -> None:
        """Report what is new in the store."""
        while self._store.check([warm_key(self._warm + 1)]):
            self._warm += 1
            self.emit({"event": "warm", "member": self._store.get(warm_key(self._warm)).decode()})
        if (move := self._move) is not None and self._store.check([boundary_key(move.number)]):
            step = int(self._store.get(boundary_key(move.number)))
            self._publish(move)
            self.emit({"event": "boundary", "number": move.number, "step": step})
        pending = self._pending
        if pending is None:
            return
        if self._store.check([result_key(pending.number)]):
            self.emit(json.loads(self._store.get(result_key(pending.number))))
            self._pending = None
        elif time.monotonic() > self._deadline:
            self.emit(self._too_late(pending))
            self._pending = None

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
