"""Is there room for checkpoints, and does their file system answer?

A file system that hangs holds this sensor's thread, and no other: the agent then reports that the sensor hangs.
"""

from __future__ import annotations

import os

from zslurm.aegis.agent.sensor import Reading, Sensor
from zslurm.aegis.fault_kinds import DISK_LOW, STORAGE_FAULT

_GB = 1e9


class Disk(Sensor):
    """Watches the free space of the checkpoint directory."""

    def read(self) -> Reading:
        """Return faults if space runs low or the file system fails, and again if that is over."""
        directory = self.context.run.checkpoints
        try:
            space = os.statvfs(directory)
        except OSError as error:
            line = f"{directory}: {error.strerror}"
            failed = self.state_fault(STORAGE_FAULT, "disk", True, line, role="advisory")
            return Reading(ok=False, why=line, faults=tuple(failed))
        faults = self.state_fault(STORAGE_FAULT, "disk", False, "it answers again", role="advisory")
        free, wanted_gb = space.f_bavail * space.f_frsize / _GB, self.context.settings.disk_free_gb
        # A file system may have no fixed number of files: then it reports that it has none at all.
        no_files = space.f_files > 0 and space.f_favail == 0
        what = "no more files can be made" if no_files else f"{free:.3g} GB free, {wanted_gb:g} wanted"
        faults += self.state_fault(DISK_LOW, "disk", free < wanted_gb or no_files, f"{directory}: {what}")
        return Reading(faults=tuple(faults), values={"free_gb": round(free, 1)})


make = Disk
