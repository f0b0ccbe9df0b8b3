"""A rank's part in the recovery of a program that calls `zslurm.recover`: its program alone is started again.

    a program is lost    its rank asks rank 0 for a generation (stop_channel.py), and starts the program in it
    the other ranks      write the generation to a file that their program watches (zslurm/recovering.py)
    their programs       leave their process group, and meet in the new generation, with the new program

A program that does not join in time is killed and started in the new generation as well. What cannot be healed so
ends this rank with its program's code, and the supervisor starts all ranks again: a program that never called
`recover`, one that is lost three times without a further step, and ranks that are lost with their nodes.
"""

from __future__ import annotations

import contextlib
import json
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from zslurm.core.files import read_text, write_atomically
from zslurm.job.program.stop_channel import report_lost
from zslurm.progress import GENERATION_VARIABLE, RECOVERY_VARIABLE

_JOINS_S = 15.0
_ANSWERS_S = 10.0
_MOST_FAILURES = 3


class ProgramRecovery:
    """What a rank knows of the generations of its attempt."""

    def __init__(
        self,
        address: Mapping[str, Any],
        files: Path,
        world_size: int,
        report: Callable[[Mapping[str, Any]], bool] = report_lost,
    ) -> None:
        """Prepare; the attempt's ranks meet at `address` in generation 0.

        Args:
            address: of rank 0.
            files: what the names of the files that are shared with the program begin with.
            world_size: how many ranks there are.
            report: asks rank 0 for a generation.
        """
        self._address, self._files, self._size, self._report = address, files, world_size, report
        self._number, self._port, self._since = 0, int(address["port"]), time.monotonic()
        self._changed = threading.Condition()
        self._seen, self._started, self._failures, self._furthest = 0, 0, 0, -1

    def start(self) -> dict[str, str]:
        """Return the variables of a program that is started in the newest generation."""
        self._started = self._number
        return {
            "MASTER_PORT": str(self._port),
            GENERATION_VARIABLE: str(self._number),
            RECOVERY_VARIABLE: str(self._files),
        }

    def take(self, number: int, port: int) -> None:
        """Learn of a generation; any thread may call it."""
        with self._changed:
            self._number, self._port, self._since = number, port, time.monotonic()
            body = {"generation": number, "host": self._address["host"], "port": port}
            with contextlib.suppress(OSError):  # its program does not join then, and is started again
                write_atomically(self._files.with_name(f"{self._files.name}.generation"), json.dumps(body))
            self._changed.notify_all()

    def is_new(self) -> bool:
        """Return, once for each generation, whether there is a new one."""
        seen, self._seen = self._seen, self._number
        return seen != self._number

    def is_overdue(self) -> bool:
        """Return whether the program should have joined the newest generation by now."""
        if self._started == self._number or time.monotonic() < self._since + _JOINS_S:
            return False
        joined = self._joined()
        return joined is not None and joined < self._number

    def again(self, step: int) -> bool:
        """Return whether the program of this rank, which was lost, is to be started again in this attempt.

        Args:
            step: the last one that it has shown.
        """
        joined = self._joined()
        if joined is None or self._size == 1:
            return False
        self._failures = 1 if step > self._furthest else self._failures + 1
        self._furthest = max(step, self._furthest)
        if self._failures > _MOST_FAILURES:
            return False
        with self._changed:
            if joined < self._number:  # the others wait for it already
                return True
            before = self._number
            if not self._report(self._address):
                return False
            return self._changed.wait_for(lambda: self._number > before, _ANSWERS_S)

    def _joined(self) -> int | None:
        """Return the generation that the program has joined; None if it does not recover."""
        text = read_text(self._files.with_name(f"{self._files.name}.joined"))
        return int(text) if text and text.strip().isdigit() else None

    def close(self) -> None:
        """Remove the files."""
        for name in ("generation", "joined"):
            with contextlib.suppress(OSError):
                self._files.with_name(f"{self._files.name}.{name}").unlink(missing_ok=True)
