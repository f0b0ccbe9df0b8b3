"""The kernel's page cache: how much room it has, what of a file is in it, and how to put a file out of it.

Room is memory that is free or holds pages that can be dropped: MemAvailable of /proc/meminfo (proc(5)), or less
if a control group of this process has a limit, for pages count against the group that reads them first
(Documentation/admin-guide/cgroup-v2.rst, cgroup-v1/memory.rst). Files in tmpfs are memory themselves, not room.
"""

from __future__ import annotations

import mmap
import os
import re
from collections.abc import Iterator
from pathlib import Path

from zslurm.core.files import read_text
from zslurm.hardware.sysfs import key_values

_SIZE = re.compile(r"(\d+)\s+kB")
_UNLIMITED = 1 << 60  # cgroup v1 has a number near 2^63 where there is no limit
_ON_FILE_LISTS = ("active_file", "inactive_file")


def parse_meminfo(fields: dict[str, str]) -> tuple[int, int] | None:
    """Return free memory (with what caches would give back) and all of it, bytes; None if unknown."""
    free, total = (_SIZE.fullmatch(fields.get(name, "")) for name in ("MemAvailable", "MemTotal"))
    return (int(free[1]) << 10, int(total[1]) << 10) if free and total and int(total[1]) else None


def room(root: Path) -> int | None:
    """Return the bytes that the page cache can hold for this process; None if /proc/meminfo cannot be read.

    Args:
        root: where /proc and /sys are; see `sysfs.sysroot`.
    """
    memory = parse_meminfo(key_values(root / "proc/meminfo"))
    if memory is None:
        return None
    return max(0, min([memory[0], *_rooms_of_groups(root)]))


def _rooms_of_groups(root: Path) -> Iterator[int]:
    """Yield the room in each control group with a limit, from that of this process upwards."""
    for line in (read_text(root / "proc/self/cgroup") or "").splitlines():
        _, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        if controllers not in ("", "memory"):
            continue
        mount = root / ("sys/fs/cgroup/memory" if controllers else "sys/fs/cgroup")
        limit, used = ("limit_in_bytes", "usage_in_bytes") if controllers else ("max", "current")
        prefix = "total_" if controllers else ""  # of v1: with the groups below it
        group = mount / path.strip("/")
        while group.is_relative_to(mount):
            sizes = [read_text(group / f"memory.{name}") or "" for name in (limit, used)]
            if all(size.isdecimal() for size in sizes) and int(sizes[0]) < _UNLIMITED:
                stat = key_values(group / "memory.stat")
                pages = [stat.get(prefix + name, "") for name in _ON_FILE_LISTS]
                yield int(sizes[0]) - int(sizes[1]) + sum(int(text) for text in pages if text.isdecimal())
            group = group.parent


def drop(path: Path) -> None:
    """Put a file out of the page cache; what was not written to the disk yet is written first.

    A file system in memory (tmpfs) has nothing to put it out to, and keeps it: see `resident`.

    Raises:
        OSError: it cannot be opened or synced.
    """
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
    finally:
        os.close(descriptor)


def resident(path: Path) -> int:
    """Return the bytes of a file that are in the page cache, in whole pages.

    The kernel answers for files that this user owns or may write (mincore(2)); for others all pages seem resident.

    Raises:
        OSError: it cannot be opened or mapped.
    """
    import ctypes  # few programs ask

    with path.open("rb") as file:
        size = os.fstat(file.fileno()).st_size
        if not size:
            return 0
        pages = -(-size // mmap.PAGESIZE)
        found = (ctypes.c_ubyte * pages)()
        libc = ctypes.CDLL(None, use_errno=True)
        libc.mmap.restype = ctypes.c_void_p
        libc.mmap.argtypes = (
            ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long,
        )  # fmt: skip
        libc.mincore.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_void_p)
        libc.munmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t)
        address = libc.mmap(None, size, mmap.PROT_READ, mmap.MAP_SHARED, file.fileno(), 0)
        if address in (None, ctypes.c_void_p(-1).value):
            raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()), str(path))
        try:
            if libc.mincore(address, size, found):
                raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()), str(path))
        finally:
            libc.munmap(address, size)
    return sum(page & 1 for page in bytes(found)) * mmap.PAGESIZE
