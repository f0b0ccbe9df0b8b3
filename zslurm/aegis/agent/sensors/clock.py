"""Does the node's clock jump? Times of faults are compared between nodes: a jump makes a cascade look like a root.

The wall clock is held against the monotonic one, which cannot be set. NTP's slow corrections (500 ppm at most)
stay far below what counts as a jump.
"""

from __future__ import annotations

import time
from typing import Any

from pydantic import TypeAdapter

from zslurm.aegis.agent.sensor import Place, Reading, Sensor
from zslurm.aegis.fault_kinds import CLOCK_JUMP

_MEMORY = TypeAdapter(float)

JUMP_S = 1.0
"""Seconds that the wall clock may move against the monotonic one between two looks."""


class Clock(Sensor):
    """Compares the two clocks."""

    def __init__(self, place: Place) -> None:
        self._place = place
        self.period_s = place.settings.period_s
        self._offset: float | None = None
        self._reported: float | None = None

    def memory(self) -> Any:
        """Return how far the clocks were apart at the first look, or when a jump was reported last."""
        return self._reported

    def recall(self, memory: Any) -> None:
        """See Sensor."""
        self._offset = self._reported = _MEMORY.validate_python(memory)

    def read(self) -> Reading:
        """A fault where the wall clock moved by itself since the last look."""
        before, wall, after = time.monotonic(), self._place.now(), time.monotonic()
        offset, last = wall - (before + after) / 2, self._offset
        self._offset = offset
        self._reported = offset if self._reported is None else self._reported
        moved = 0.0 if last is None else offset - last
        if abs(moved) <= JUMP_S + (after - before):
            return Reading()
        self._reported = offset
        direction = "forward" if moved > 0 else "back"
        line = f"the clock jumped {direction} by {abs(moved):.1f} s"
        return Reading(faults=(self._place.fault(CLOCK_JUMP, "advisory", "node", "clock", line),))


def make(place: Place) -> Clock:
    """Make the sensor."""
    return Clock(place)
