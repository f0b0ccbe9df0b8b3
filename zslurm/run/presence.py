"""Whether the run directory is still at its path: a run whose directory was moved or removed must end.

A path that leads nowhere may also mean a file system that is away for a while. So the directory is kept open: if
the open directory still answers, or its parent does, while the path leads nowhere or elsewhere, and stays so for
a while, the directory was moved or removed.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable
from pathlib import Path

_LOOK_EVERY_S = 1.0


class Presence:
    """Watches over one run directory."""

    def __init__(self, path: Path, patience_s: float, clock: Callable[[], float] = time.monotonic) -> None:
        """Remember which directory is at `path` now; missing for `patience_s` seconds, it counts as lost."""
        self._path, self._patience_s, self._clock = path, patience_s, clock
        self._inode: int | None = None
        self._descriptor = -1
        with contextlib.suppress(OSError):
            self._descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
            self._inode = os.fstat(self._descriptor).st_ino
        self._missing_since: float | None = None
        self._why: str | None = None
        self._look_at = 0.0

    def lost(self) -> str | None:
        """Return why the run directory counts as lost; None while it is there, or nothing certain is known."""
        now = self._clock()
        if self._inode is None or now < self._look_at:
            return self._decided(now)
        self._look_at = now + min(_LOOK_EVERY_S, self._patience_s / 4)
        self._why = self._missing()
        if self._why is None:
            self._missing_since = None
        elif self._missing_since is None:
            self._missing_since = now
        return self._decided(now)

    def settled(self, pause: Callable[[float], None] = time.sleep) -> str | None:
        """Wait until a directory that is missing is back or counts as lost; returns why it is lost, or None.

        Ranks whose directory vanished can end before it counts as lost: their end proves nothing then.
        """
        self._look_at = 0.0
        while (why := self.lost()) is None and self._missing_since is not None:
            pause(min(_LOOK_EVERY_S, self._patience_s / 4))
        return why

    def _decided(self, now: float) -> str | None:
        over = self._missing_since is not None and now - self._missing_since >= self._patience_s
        return self._why if over else None

    def _missing(self) -> str | None:
        """Return what became of the directory; None if it is there, or its file system does not answer."""
        try:
            if self._path.stat().st_ino == self._inode:
                return None
            return f"another directory is at {self._path} now"
        except (FileNotFoundError, NotADirectoryError):
            pass
        except OSError:
            return None
        try:
            if not os.fstat(self._descriptor).st_nlink:
                return f"the run directory {self._path} was removed"
            path_now = str(Path(f"/proc/self/fd/{self._descriptor}").readlink())
        except OSError:  # removed by another client of the file system, or that is away
            return f"the run directory {self._path} is gone" if self._path.parent.is_dir() else None
        if path_now.endswith(" (deleted)"):
            return f"the run directory {self._path} was removed"
        if path_now == str(self._path):
            return f"the run directory {self._path} is gone" if self._path.parent.is_dir() else None
        return f"the run directory {self._path} was moved to {path_now}"
