"""Runs each sensor in a separate thread, hands on what is new, and keeps what the next agent must know.

A sensor that hangs in a driver or a dead mount is reported by the thread that looks (`hanging_reading`); its own
thread cannot be ended, and is not waited for.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import replace

from zslurm.aegis.agent.attempt_baselines import NodeMemory
from zslurm.aegis.agent.sensor import Make, NodeContext, Reading, Sensor
from zslurm.aegis.fault_kinds import BASELINE_LOST
from zslurm.checkpoint_tools.plain import in_words, reason_of

REPEAT_S = 60.0
"""Seconds after which a reading without news is handed on as well."""

Hand = Callable[[str, Reading], None]


class SensorRunner:
    """One sensor at work."""

    def __init__(
        self,
        name: str,
        make: Make,
        context: NodeContext,
        hand_on: Hand,
        stop: threading.Event,
        memory: NodeMemory,
        attempt: Callable[[], int],
    ) -> None:
        """Prepare; `start` makes and reads the sensor.

        Args:
            name: of the sensor.
            make: makes it, in the thread.
            context: for `make`.
            hand_on: gets readings that are news: faults, or news of whether the sensor can read, or
                values that differ.
            stop: ends the thread after its reading.
            memory: of the node.
            attempt: number of the present attempt; 0 before the first.
        """
        self.name = name
        self._make, self.context, self._hand_on, self._stop = make, context, hand_on, stop
        self._memory, self._attempt = memory, attempt
        self._number = 0
        self._was_read = False
        self._busy_since: float | None = None
        self._last: Reading | None = None
        self._handed_at = 0.0
        self._hang_reported = False
        self._sensor: Sensor | None = None
        self._due = threading.Event()
        self._thread = threading.Thread(target=self._work, name=f"sensor-{name}", daemon=True)

    def start(self) -> None:
        """Start the thread."""
        self._busy_since = time.monotonic()
        self._thread.start()

    def look_now(self) -> None:
        """Read without waiting for the next time."""
        self._due.set()

    def close(self) -> None:
        """End what the sensor started, once it has to stop. One that hangs is not waited for."""
        self._due.set()
        self._thread.join(0.1)
        if self._sensor is not None and not self._thread.is_alive():
            self._sensor.close()

    def hanging_reading(self, limit_s: float) -> Reading | None:
        """Return a reading, once, if the sensor has read nothing for longer than the limit; else None."""
        since = self._busy_since
        if since is None or time.monotonic() - since <= limit_s or self._hang_reported:
            return None
        self._hang_reported = True
        self._last = Reading(ok=False, why=f"nothing was read for {limit_s:g} s: it hangs")
        return self._last

    def excuse(self, seconds: float) -> None:
        """Excuse the sensor for a time in which this whole process was stopped."""
        if (since := self._busy_since) is not None:
            self._busy_since = since + seconds

    def _work(self) -> None:
        try:
            self._sensor = self._make(self.context)
        except Exception as error:  # one broken sensor must not stop the others
            self._news(Reading(ok=False, why=f"it cannot be made: {reason_of(error)}"))
            self._busy_since = None
            return
        if self._sensor is not None:
            self._recall(self._sensor)
        while self._sensor is not None and not self._stop.is_set():
            self._busy_since = time.monotonic()
            try:
                reading = self._look(self._sensor)
            except Exception as error:
                reading = Reading(ok=False, why=f"it failed: {reason_of(error)}")
            self._busy_since = None
            self._hang_reported = False
            self._news(reading)
            self._due.wait(self._sensor.period_s)
            self._due.clear()
        self._busy_since = None

    def _recall(self, sensor: Sensor) -> None:
        """Continue from the start of an earlier agent of this attempt; begin again if that is not possible."""
        self._number = self._attempt()
        state = self._memory.known.get(self.name)
        if state is None:
            return
        try:
            sensor.recall(state)
        except (ValueError, TypeError, KeyError, AttributeError, OverflowError) as error:
            line = f"{self.name}: what was remembered of attempt {self._number} is damaged: {in_words(error)}"
            fault = self.context.fault(BASELINE_LOST, "agent", f"{line}; it begins again")
            self._hand_on(self.name, Reading(faults=(fault,)))

    def _look(self, sensor: Sensor) -> Reading:
        """Read once, for the attempt that it belongs to."""
        number = self._attempt()
        if number > self._number:
            self._number = number
            sensor.begin_attempt()
        reading = sensor.read()
        self._memory.keep(self._number, self.name, sensor.memory())
        if reading.ok and not self._was_read:
            self._was_read = True
            reading = replace(reading, first=True)
        return reading

    def _news(self, reading: Reading) -> None:
        now, first = time.monotonic(), reading.first
        reading = replace(reading, first=False)
        if reading.pending and not reading.faults:
            return
        if first or reading != self._last or reading.faults or now - self._handed_at >= REPEAT_S:
            self._hand_on(self.name, replace(reading, first=first))
            self._handed_at = now
        self._last = reading
