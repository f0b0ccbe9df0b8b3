"""Is there room in /tmp?"""

from __future__ import annotations

import os

from zslurm.checkpoint_tools.quantities import counted, show_bytes
from zslurm.doctor.check import Check, Outcome, failed, passed, unavailable, warned
from zslurm.hardware.node_sources import Sources

_GIB = 1 << 30


def check(sources: Sources) -> Outcome:
    """Free space and free inodes for this user."""
    try:
        space = os.statvfs(sources.path("/tmp"))
    except OSError as error:
        return unavailable(f"/tmp: {error.strerror}")
    free, remedy = space.f_bavail * space.f_frsize, "remove old files from /tmp of these nodes"
    if not free or (space.f_files and not space.f_favail):
        return failed(f"/tmp is full ({counted(space.f_favail, 'inode')} free)", remedy)
    if free < sources.limits.tmp_gib * _GIB:
        return warned(f"/tmp has {show_bytes(free)} free, {sources.limits.tmp_gib:g} GiB wanted", remedy)
    return passed(f"{show_bytes(free)} free")


CHECK = Check("disk", "storage", "room in /tmp", "both", check)
