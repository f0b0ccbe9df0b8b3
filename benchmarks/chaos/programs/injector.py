"""What a program records, and the faults that it injects into itself. Imports nothing but the standard library.

CHAOS_DIR is a directory that all nodes share. `plan.json` in it has the faults; every row of `record.jsonl` is
one moment of one process. A fault happens once, or on every start if its plan says `again`.
"""

from __future__ import annotations

import errno
import json
import os
import signal
import socket
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any


class Injector:
    """Records steps, and lets the faults of the plan happen after them.

    Args:
        rank: of this process, as the plan counts ranks.
    """

    def __init__(self, rank: int) -> None:
        self.directory = Path(os.environ["CHAOS_DIR"])
        self.rank, self.node = rank, os.environ.get("SLURMD_NODENAME") or socket.gethostname()
        plan = json.loads((self.directory / "plan.json").read_text())
        self._pace_s: float = plan["pace_s"]
        self._steps: int = plan["steps"]
        self._faults: list[dict[str, Any]] = [
            {**fault, "number": number} for number, fault in enumerate(plan["faults"]) if fault["in_program"]
        ]
        self._record = os.open(self.directory / "record.jsonl", os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
        self.note("start")

    def note(self, moment: str, **fields: object) -> None:
        """Append a row to the record."""
        row = {"moment": moment, "time": time.time(), "rank": self.rank, "node": self.node, "pid": os.getpid()}
        os.write(self._record, (json.dumps(row | fields) + "\n").encode())

    def after_step(self, step: int, loss: float, spoil: Callable[[], None] | None = None) -> None:
        """Record a step, wait for its pace, and let happen what the plan has for it.

        Args:
            step: that is complete, counted from 1.
            loss: of this rank.
            spoil: makes a parameter of this rank not a number.
        """
        print(f"step {step} loss {loss:.6f} time {time.time():.3f}", flush=True)
        self.note("step", step=step, loss=loss)
        time.sleep(self._pace_s + self._slowness_s())
        for fault in self._faults:
            if fault["fault"] != "full_disk" and self._is_due(fault, step):
                self._strike(fault, spoil)
        if step == self._steps:
            self.note("done")

    def before_save(self, step: int) -> None:
        """Fail as a full disk does, if the plan has that for this save.

        Raises:
            OSError: no space is left.
        """
        for fault in self._faults:
            if fault["fault"] == "full_disk" and step >= fault["step"] and self._once(fault):
                self.note("fault", fault="full_disk", number=fault["number"])
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def _is_due(self, fault: dict[str, Any], step: int) -> bool:
        is_mine = step == fault["step"] and self.rank == fault["rank"]
        return is_mine and (fault.get("again", False) or self._once(fault))

    def _once(self, fault: dict[str, Any]) -> bool:
        """Return whether the fault has not happened before, in any process."""
        try:
            mark = os.open(self.directory / f"struck-{fault['number']}", os.O_CREAT | os.O_EXCL | os.O_WRONLY)
        except FileExistsError:
            return False
        os.write(mark, self.node.encode())
        os.close(mark)
        return True

    def _slowness_s(self) -> float:
        """Return the seconds that a step takes longer on this node since a fault made the node slow."""
        seconds = 0.0
        for fault in self._faults:
            mark = self.directory / f"struck-{fault['number']}"
            if fault["fault"] == "slow_rank" and mark.exists() and mark.read_text() == self.node:
                seconds += fault["seconds"]
        return seconds

    def _strike(self, fault: dict[str, Any], spoil: Callable[[], None] | None) -> None:
        self.note("fault", fault=fault["fault"], number=fault["number"])
        match fault["fault"]:
            case "process_killed":
                os.kill(os.getpid(), signal.SIGKILL)
            case "hang":
                while True:
                    time.sleep(60)
            case "user_bug":
                raise ValueError("shapes (4, 8) and (6, 8) do not fit")
            case "nan" if spoil is not None:
                spoil()
            case "slow_rank":
                pass  # every step from here on, see _slowness_s
            case name:
                sys.exit(f"this program cannot inject {name}")
