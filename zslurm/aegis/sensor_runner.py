"""Runs each sensor in a thread of its own and hands on what is new.

A sensor that hangs in a driver or a dead mount is told as silent by whoever looks (`silent_reading`); its thread
cannot be ended, and nobody waits for it.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

from zslurm.aegis.sensor import Make, Place, Reading, Sensor

REPEAT_S = 60.0
"""A reading without news is handed on after so long all the same."""

Hand = Callable[[str, Reading], None]


class SensorRunner:
    """One sensor at work."""

    def __init__(self, name: str, make: Make, place: Place, hand_on: Hand, stop: threading.Event) -> None:
        """
        Args:
            name: of the sensor.
            make: makes it, in the thread.
            place: for `make`.
            hand_on: gets readings that are news: faults, or another word on whether the sensor can read, or
                values that differ.
            stop: ends the thread after its reading.
        """
        self.name = name
        self._make, self._place, self._hand_on, self._stop = make, place, hand_on, stop
        self._busy_since: float | None = None
        self._last: Reading | None = None
        self._handed_at = 0.0
        self._said_silent = False
        self._sensor: Sensor | None = None
        self._due = threading.Event()
        self._thread = threading.Thread(target=self._work, name=f"sensor-{name}", daemon=True)

    def start(self) -> None:
        self._busy_since = time.monotonic()
        self._thread.start()

    def look_now(self) -> None:
        """Read without waiting for the next time."""
        self._due.set()

    def close(self) -> None:
        """End what the sensor started, once it was told to stop. One that hangs is left alone."""
        self._due.set()
        self._thread.join(0.1)
        if self._sensor is not None and not self._thread.is_alive():
            self._sensor.close()

    def silent_reading(self, limit_s: float) -> Reading | None:
        """What to say, once, where the sensor has said nothing for longer than the limit; else None."""
        since = self._busy_since
        if since is None or time.monotonic() - since <= limit_s or self._said_silent:
            return None
        self._said_silent = True
        self._last = Reading(ok=False, why=f"it has said nothing for {limit_s:g} s: it hangs")
        return self._last

    def excuse(self, seconds: float) -> None:
        """This process was stopped for so long: the sensor was, too, and does not hang for that."""
        if (since := self._busy_since) is not None:
            self._busy_since = since + seconds

    def _work(self) -> None:
        try:
            self._sensor = self._make(self._place)
        except Exception as error:  # one broken sensor must not silence the others
            self._news(Reading(ok=False, why=f"it cannot be made: {type(error).__name__}: {error}"))
            self._busy_since = None
            return
        while self._sensor is not None and not self._stop.is_set():
            self._busy_since = time.monotonic()
            try:
                reading = self._sensor.read()
            except Exception as error:
                reading = Reading(ok=False, why=f"it failed: {type(error).__name__}: {error}")
            self._busy_since = None
            self._said_silent = False
            self._news(reading)
            self._due.wait(self._sensor.period_s)
            self._due.clear()
        self._busy_since = None

    def _news(self, reading: Reading) -> None:
        now = time.monotonic()
        if reading.pending and not reading.faults:
            return
        if reading != self._last or reading.faults or now - self._handed_at >= REPEAT_S:
            self._hand_on(self.name, reading)
            self._handed_at = now
        self._last = reading
