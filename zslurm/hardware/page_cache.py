"""The kernel's page cache: how much room it has.

Room is memory that is free or holds pages that can be dropped: MemAvailable of /proc/meminfo (proc(5)), or less
if a control group of this process has a limit, for pages count against the group that reads them first
(Documentation/admin-guide/cgroup-v2.rst, cgroup-v1/memory.rst). Files in tmpfs are memory themselves, not room.
"""

from __future__ import annotations

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
        root: the directory of /proc and /sys; see `sysfs.sysroot`.
    """
    memory = parse_meminfo(key_values(root / "proc/meminfo"))
    if memory is None:
        return None
    return max(0, min([memory[0], *_rooms_of_groups(root)]))


def _rooms_of_groups(root: Path) -> Iterator[int]:
    """Yield the free bytes of each control group with a limit, from this process's group upwards."""
    for line in (read_text(root / "proc/self/cgroup") or "").splitlines():
        _, _, remainder = line.partition(":")
        controllers, _, path = remainder.partition(":")
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
