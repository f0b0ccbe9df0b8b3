"""How long this process itself was stopped: Slurm suspends jobs (SIGSTOP), and gang scheduling does so in turns.

All processes of the job are stopped together, and the clocks run on. What was silent or made no progress meanwhile
must not be taken for dead or hanging. What looks at a clock regularly calls `tick`; a long time between two
calls is a pause.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable

_LONGEST_TICK_S = 3.0
_KEPT = 1000


class Pauses:
    """The pauses of this process. Any thread may tick.

    Attributes:
        total_s: seconds of all pauses so far.
    """

    def __init__(
        self, longest_tick_s: float = _LONGEST_TICK_S, clock: Callable[[], float] = time.monotonic
    ) -> None:
        """Begin to look: more than `longest_tick_s` between two ticks is a pause."""
        self._longest_s, self._clock = longest_tick_s, clock
        self._lock = threading.Lock()
        self._last = clock()
        self.total_s = 0.0
        self._pauses: deque[tuple[float, float]] = deque(maxlen=_KEPT)

    def tick(self) -> float:
        """Note that this process runs; returns the seconds of the pause that ends with this call, or 0."""
        with self._lock:
            last, self._last = self._last, self._clock()
            if self._last - last <= self._longest_s:
                return 0.0
            self._pauses.append((last, self._last))
            self.total_s += self._last - last
            return self._last - last

    def since(self, when: float) -> float:
        """Seconds of pauses after a point in (monotonic) time."""
        with self._lock:
            return sum(max(0.0, end - max(begin, when)) for begin, end in self._pauses)


class PauseReader:
    """Reads the pauses of this process for one of those who wait for something, each pause once."""

    def __init__(self, pauses: Pauses) -> None:
        """Read the pauses that come from now on."""
        self._pauses = pauses
        pauses.tick()
        self._read_s = pauses.total_s

    def new_s(self) -> float:
        """Return the seconds of pauses since the last call, up to now.

        Read the clock before: then a pause that comes after this call is not in that time.
        """
        self._pauses.tick()
        before, self._read_s = self._read_s, self._pauses.total_s
        return self._read_s - before
