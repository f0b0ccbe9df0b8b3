"""Lines on their way out. A reader that does not read holds up only the thread that writes."""

from __future__ import annotations

import contextlib
import os
import threading
from collections import deque

_MOST_WAITING = 2000
"""Lines that wait for a reader; then the oldest are dropped: where the ranks were is of no use later."""


class Outbox:
    """Writes lines to a file descriptor in a separate thread."""

    def __init__(self, fd: int) -> None:
        """Start the thread that writes to `fd`."""
        self._fd = fd
        self._lines: deque[str] = deque(maxlen=_MOST_WAITING)
        self._filled = threading.Condition()
        self._writing = False
        threading.Thread(target=self._write, name="outbox", daemon=True).start()

    def put(self, lines: list[str]) -> None:
        """Send lines; returns at once."""
        with self._filled:
            self._lines.extend(lines)
            self._filled.notify_all()

    def flush(self, limit_s: float) -> None:
        """Wait until everything is written, or the time is over."""
        with self._filled:
            self._filled.wait_for(lambda: not self._lines and not self._writing, limit_s)

    def _write(self) -> None:
        while True:
            with self._filled:
                self._writing = False
                self._filled.notify_all()
                self._filled.wait_for(lambda: bool(self._lines))
                line = self._lines.popleft()
                self._writing = True
            with contextlib.suppress(OSError):  # without a reader the standby supervisor still has work to do
                os.write(self._fd, line.encode("ascii"))
