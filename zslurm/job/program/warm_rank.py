"""A rank's end of a warm program: takes the one that waits, and has its keeper prepare the next one.

See warm_keeper.py for what the two say to each other. Whatever goes wrong on the way to a warm program, the rank
starts its program in the usual way.
"""

from __future__ import annotations

import contextlib
import select
import signal
import socket
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from zslurm.config.python_call import python_call
from zslurm.job.program.warm_program import receive, send

_CONNECT_EVERY_S = 1.0
_QUIET_S = 60.0
"""After this time a program that shows no steps counts as started."""
_PREPARES_S = 120.0
"""The most that a rank waits for a program whose imports have begun."""


class WarmProcess:
    """A program that a keeper runs for this rank.

    Attributes:
        pid: its number, and that of its process group.
        left_behind: names of the processes that it left behind and that were ended; known when it has ended.
    """

    def __init__(self, pid: int, keeper: socket.socket) -> None:
        self.pid, self._keeper, self._code = pid, keeper, None
        self.left_behind: list[str] = []

    _code: int | None

    def poll(self) -> int | None:
        """Return its exit code, negative for a signal; None while it runs."""
        if self._code is None and _is_readable(self._keeper):
            received = receive(self._keeper)
            # The kernel ends the program if its keeper has ended.
            message: dict[str, Any] = (
                received[0] if received is not None else {"code": -signal.SIGKILL, "left": []}
            )
            self._code, self.left_behind = int(message["code"]), list(message["left"])
        return self._code


class WarmSlot:
    """The place of this rank's warm program on its node."""

    def __init__(self, path: Path) -> None:
        """Prepare.

        Args:
            path: the socket of the keeper.
        """
        self._path, self._keeper = path, None
        self._began, self._connect_at, self._told = time.monotonic(), 0.0, False

    _keeper: socket.socket | None

    def take(
        self, command: Sequence[str], environ: Mapping[str, str], over: Callable[[], bool]
    ) -> WarmProcess | None:
        """Start the program in the process that waits; None if there is none.

        Args:
            command: the program and its arguments.
            environ: its variables.
            over: returns whether the rank is to stop.
        """
        call = python_call(command)
        keeper = self._connected()
        if call is None or keeper is None:
            return None
        sys.stdout.flush()
        sys.stderr.flush()
        message = {"arguments": call.arguments, "environ": dict(environ)}
        with contextlib.suppress(OSError):
            send(keeper, message, (1, 2))
            deadline = time.monotonic() + _PREPARES_S
            while not _is_readable(keeper, 0.1):
                if over() or time.monotonic() > deadline:
                    self.close()
                    return None
            received = receive(keeper)
            if received is not None and "pid" in received[0]:
                print("zslurm: the program was started in a warm process", flush=True)
                return WarmProcess(int(received[0]["pid"]), keeper)
            if received is not None and received[0]["none"]:
                print(f"zslurm: this rank starts without trainer.warm: {received[0]['none']}", flush=True)
            if received is not None:
                return None
        self.close()
        return None

    def look(self, *, stepped: bool) -> None:
        """Have the next program prepared once this one makes steps, or has run for a minute."""
        if self._told or not (stepped or time.monotonic() > self._began + _QUIET_S):
            return
        if time.monotonic() < self._connect_at or (keeper := self._connected()) is None:
            return
        try:
            send(keeper, {"steps": True})
        except OSError:
            self.close()
            return
        self._told = True

    def _connected(self) -> socket.socket | None:
        """Return the connection to the keeper; None if it does not listen (yet)."""
        if self._keeper is None:
            self._connect_at = time.monotonic() + _CONNECT_EVERY_S
            keeper = socket.socket(socket.AF_UNIX)
            try:
                keeper.connect(str(self._path))
            except OSError:
                keeper.close()
                return None
            self._keeper = keeper
        return self._keeper

    def close(self) -> None:
        """Leave the keeper, which kills a program of this rank that still runs."""
        if self._keeper is not None:
            self._keeper.close()
        self._keeper = None


def _is_readable(channel: socket.socket, seconds: float = 0.0) -> bool:
    return bool(select.select([channel], [], [], seconds)[0])
