"""What the agents of one node hand on to each other about an attempt: a file in the node's memory.

A sensor reports changes. What it compares with belongs to the attempt and not to the agent: an agent that is
started again in mid-attempt must see what broke before. So each sensor leaves what it saw when the
attempt began (`Sensor.memory`), and the next agent's sensor continues from there (`Sensor.recall`).

The file is written whole and put in place by rename. One that is missing, damaged, or another user's is as good
as none: sensors then begin again, and the agent reports that they did. The directory is open to every user, so a
file is believed only if this user owns it. The agent that sees another attempt begin removes the files of
earlier ones, and the one that gets the command to quit at the end of the run removes the last.
"""

from __future__ import annotations

import contextlib
import glob
import json
import os
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from zslurm.core.files import write_atomically
from zslurm.run.run_dir import RunDir

_VERSION = 1
_LONGEST = 1 << 22


class DamagedBaselines(Exception):
    """What the agents before left cannot be used; the message is the reason."""


class NodeMemory:
    """The memory of one node. Any thread may use it, and no method raises for what a file system may do."""

    def __init__(self, run: RunDir, environ: Mapping[str, str], attempt: int) -> None:
        """Load what the agents before left.

        Args:
            run: the run.
            environ: of the agent; names the node.
            attempt: that runs already when this agent starts; 0 if none does.
        """
        self._run, self._environ = run, dict(environ)
        self._lock = threading.Lock()
        self._attempt = attempt
        self._states: dict[str, Any] = {}
        self._closed = False
        self.frozen = False
        """This agent is not heard: what it sees now is left for the next agent to see."""
        self.problem = ""
        """Why nothing is known of the beginning of the attempt; empty where it is, or none runs."""
        if attempt:
            try:
                self._states = self._load(attempt)
            except FileNotFoundError:
                self.problem = "nothing was remembered"
            except DamagedBaselines as error:
                self.problem = str(error)
        self.known = dict(self._states)
        """What each sensor left, by name, when this agent started."""

    def path(self, attempt: int) -> Path:
        """Return the path of an attempt's memory."""
        return self._run.node_memory(self._environ, attempt)

    def keep(self, attempt: int, sensor: str, state: Any) -> None:
        """Remember the state of a sensor in an attempt; None is nothing worth remembering."""
        with self._lock:
            if self._closed or self.frozen or attempt < self._attempt or not attempt:
                return
            if attempt > self._attempt:
                self._attempt, self._states = attempt, {}
                self._remove(keep=attempt)
            if state is None or self._states.get(sensor) == state:
                return
            self._states[sensor] = state
            body = {"version": _VERSION, "attempt": attempt, "sensors": self._states}
            with contextlib.suppress(OSError):
                write_atomically(self.path(attempt), json.dumps(body), private=True)

    def forget(self) -> None:
        """Remove the files of this run on this node: it is over."""
        with self._lock:
            self._closed = True
            self._remove(keep=0)

    def _load(self, attempt: int) -> dict[str, Any]:
        """Read what was kept of an attempt.

        Raises:
            FileNotFoundError: nothing was.
            DamagedBaselines: it cannot be used.
        """
        path = self.path(attempt)
        try:
            number = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
            with os.fdopen(number, "rb") as file:
                if os.fstat(number).st_uid != os.getuid():
                    raise DamagedBaselines(f"{path} is another user's")
                text = file.read(_LONGEST)
        except FileNotFoundError:
            raise
        except OSError as error:
            raise DamagedBaselines(f"{path}: {error.strerror}") from error
        try:
            body = json.loads(text)
            if body["version"] != _VERSION or body["attempt"] != attempt or not isinstance(body["sensors"], dict):
                raise DamagedBaselines(f"{path} is of another version or attempt")
        except (ValueError, KeyError, TypeError, RecursionError) as error:
            raise DamagedBaselines(f"{path} is damaged") from error
        return dict(body["sensors"])

    def _remove(self, *, keep: int) -> None:
        """Remove the files of all attempts but one."""
        some = self.path(0)
        name = some.name.removesuffix("0.json")
        for path in some.parent.glob(f"{glob.escape(name)}*.json"):
            number = path.name.removeprefix(name).removesuffix(".json")
            if number.isdecimal() and int(number) != keep:
                with contextlib.suppress(OSError):
                    path.unlink()
