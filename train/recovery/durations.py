"""How long each part of a recovery took in this process: by the clock, and of its processor time.

    leave     groups, copies and saves of the old generation are left
    meet      every member has done so too; most of it is the way in of the process that takes the lost place
    connect   the group of all ranks is there
    regroup   and so are the other groups
    agree     the step to go back to is known
    return    the state of that step is there: from this rank's own copy, or from its buddy
    restore   masters and optimizer state are back at that step
    compare   the weights are gathered from the masters, and are the same on all ranks

Each rank writes them to its log.
"""

from __future__ import annotations

import time


class Parts:
    """The parts of one recovery, in their order."""

    def __init__(self) -> None:
        """Begin now."""
        self.began = self._last = time.monotonic()
        self._processor = time.process_time()
        self.found: dict[str, tuple[float, float]] = {}

    def end(self, name: str) -> None:
        """Note that a part ends now; one that was repeated, as a further rank was lost, counts as one."""
        now, processor = time.monotonic(), time.process_time()
        wall_s, processor_s = self.found.get(name, (0.0, 0.0))
        self.found[name] = (wall_s + now - self._last, processor_s + processor - self._processor)
        self._last, self._processor = now, processor

    @property
    def seconds(self) -> float:
        """Seconds since it began."""
        return time.monotonic() - self.began

    def __str__(self) -> str:
        """Return each part with its seconds, by the clock and of the processor."""
        return ", ".join(f"{name} {wall_s:.3f} ({cpu_s:.3f})" for name, (wall_s, cpu_s) in self.found.items())
