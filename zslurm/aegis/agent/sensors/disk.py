"""Is there room for checkpoints, and does their file system answer?

A file system that hangs holds this sensor's thread, and no other: the agent then reports that the sensor hangs.
"""

from __future__ import annotations

import os
from pathlib import Path

from zslurm.aegis.agent.sensor import Place, Reading, Sensor
from zslurm.aegis.fault_kinds import DISK_LOW, STORAGE_FAULT, FaultKind
from zslurm.aegis.types import Fault

_GB = 1e9


class Disk(Sensor):
    """Watches the free space of the checkpoint directory."""

    def __init__(self, place: Place, directory: Path) -> None:
        self._place, self._directory = place, directory
        self.period_s = place.settings.period_s
        self._low = self._failed = False

    def read(self) -> Reading:
        """Return faults where space runs low or the file system fails, and again where that is over."""
        try:
            space = os.statvfs(self._directory)
        except OSError as error:
            words = f"{self._directory}: {error.strerror}"
            faults = () if self._failed else (self._fault(STORAGE_FAULT, words),)
            self._failed = True
            return Reading(ok=False, why=words, faults=faults)
        faults = (self._fault(STORAGE_FAULT, "it answers again", cleared=True),) if self._failed else ()
        self._failed = False
        free = space.f_bavail * space.f_frsize / _GB
        # A file system may have no fixed number of files: then it says that it has none at all.
        no_files = space.f_files > 0 and space.f_favail == 0
        return Reading(faults=(*faults, *self._space(free, no_files)), values={"free_gb": round(free, 1)})

    def _space(self, free: float, no_files: bool) -> list[Fault]:
        wanted = self._place.settings.disk_free_gb
        low, was_low = free < wanted or no_files, self._low
        self._low = low
        if low == was_low:
            return []
        what = "no more files can be made" if no_files else f"{free:.3g} GB free, {wanted:g} wanted"
        return [self._fault(DISK_LOW, f"{self._directory}: {what}", cleared=not low)]

    def _fault(self, kind: FaultKind, line: str, *, cleared: bool = False) -> Fault:
        return self._place.fault(kind, "advisory", "storage", "disk", line, cleared=cleared)


def make(place: Place) -> Disk:
    """Make the sensor."""
    return Disk(place, place.run.checkpoints)
