"""When each line of a rank's log was written, at no cost for who writes it.

Lines of NCCL, of the C library and of tracebacks carry no time, and a process in between that stamps them would
have to be there for every byte, also when a rank dies. So the log stays as it is, and next to it the rank notes
how long the log is: a thread looks once a second and appends (length, time) if the log has grown. A line was
written before the first such note that covers it; what came after the last one, before the log's own time of
change. That places every line within a second, a rank's last words included.
"""

from __future__ import annotations

import bisect
import contextlib
import struct
import threading
import time
from pathlib import Path

_NOTE = struct.Struct("<Qd")
_EVERY_S = 1.0


def keep_times(log: Path, times: Path, every_s: float = _EVERY_S) -> None:
    """Note the growth of this process's own log for as long as the process lives."""
    threading.Thread(target=_keep, args=(log, times, every_s), name="log-times", daemon=True).start()


def _keep(log: Path, times: Path, every_s: float) -> None:
    length = 0
    with contextlib.suppress(OSError):  # a full disk ends the notes, not the training
        while True:
            time.sleep(every_s)
            size = log.stat().st_size if log.exists() else 0
            if size > length:
                length = size
                with times.open("ab") as file:
                    file.write(_NOTE.pack(size, time.time()))


class LogTimes:
    """The times of one log's lines."""

    def __init__(self, log: Path, times: Path) -> None:
        """Read what is noted about a log; without notes every line has the time of the log's last change."""
        try:
            noted = times.read_bytes()
        except OSError:
            noted = b""
        pairs: list[tuple[int, float]] = list(_NOTE.iter_unpack(noted[: len(noted) - len(noted) % _NOTE.size]))
        self._lengths = [length for length, _ in pairs]
        self._times = [when for _, when in pairs]
        # The file server's clock may be behind the node's.
        self._changed = max(log.stat().st_mtime, *self._times[-1:], 0.0)

    def of(self, end: int) -> float:
        """Return when the byte before offset `end` was written (UNIX seconds)."""
        index = bisect.bisect_left(self._lengths, end)
        return self._times[index] if index < len(self._times) else self._changed
