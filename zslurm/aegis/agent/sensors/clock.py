"""Does the node's clock jump? Times of faults are compared between nodes: a jump makes a cascade look like a root.

The wall clock is compared with the monotonic one, which cannot be set. NTP's slow corrections (500 ppm at most)
stay far below what counts as a jump.
"""

from __future__ import annotations

import time
from typing import Any

from pydantic import TypeAdapter

from zslurm.aegis.agent.sensor import NodeContext, Reading, Sensor
from zslurm.aegis.fault_kinds import CLOCK_JUMP

_MEMORY = TypeAdapter(float)

JUMP_S = 1.0
"""Seconds that the wall clock may move against the monotonic one between two looks."""


class Clock(Sensor):
    """Compares the two clocks."""

    def __init__(self, context: NodeContext) -> None:
        super().__init__(context)
        self._offset: float | None = None
        self._reported: float | None = None

    def memory(self) -> Any:
        """Return how far the clocks were apart at the first look, or when a jump was reported last."""
        return self._reported

    def recall(self, memory: Any) -> None:
        """See Sensor."""
        self._offset = self._reported = _MEMORY.validate_python(memory)

    def read(self) -> Reading:
        """Return a fault if the wall clock moved by itself since the last look."""
        before, wall, after = time.monotonic(), self.context.now(), time.monotonic()
        offset, last = wall - (before + after) / 2, self._offset
        self._offset = offset
        self._reported = offset if self._reported is None else self._reported
        moved = 0.0 if last is None else offset - last
        if abs(moved) <= JUMP_S + (after - before):
            return Reading()
        self._reported = offset
        line = f"the clock jumped {'forward' if moved > 0 else 'back'} by {abs(moved):.1f} s"
        return Reading(faults=(self.context.fault(CLOCK_JUMP, "clock", line),))


make = Clock
