"""Is there room in /dev/shm, and is nothing left there?"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

from zslurm.checkpoint_tools.quantities import counted, show_bytes
from zslurm.doctor.check import Check, Outcome, failed, unavailable, warned, worst
from zslurm.hardware.node_sources import Sources
from zslurm.hardware.sysfs import names

_GIB, _MIB = 1 << 30, 1 << 20
_MOST_NAMED = 3


def check(sources: Sources) -> Outcome:
    """Free space, and memory of this user's files that no process has open or mapped; small ones do no harm."""
    place = sources.path("/dev/shm")
    try:
        space = os.statvfs(place)
    except OSError as error:
        return unavailable(f"/dev/shm: {error.strerror}", "mount a tmpfs there")
    free = space.f_bavail * space.f_frsize
    problems = []
    if free < sources.limits.shm_gib * _GIB:
        text = f"/dev/shm has {show_bytes(free)} free, {sources.limits.shm_gib:g} GiB needed"
        problems.append(failed(text, "remove what is left there, or mount it with a larger size"))
    stale = _stale(sources.root, place)
    total = sum(size for _, size in stale)
    if total >= _MIB:
        named = ", ".join(path.name for path, _ in stale[:_MOST_NAMED])
        more = f" and {len(stale) - _MOST_NAMED} more" if len(stale) > _MOST_NAMED else ""
        text = f"{counted(len(stale), 'file')} of yours that nobody uses, {show_bytes(total)}: {named}{more}"
        problems.append(warned(text, "remove them from /dev/shm of these nodes (srun -w NODES rm ...)"))
    return worst(problems, f"{show_bytes(free)} free")


def _stale(root: Path, place: Path) -> list[tuple[Path, int]]:
    """This user's files there that none of this user's processes uses, largest first."""
    used = set(_in_use(root))
    found = []
    for folder, _, files in os.walk(place):
        for name in files:
            path = Path(folder) / name
            try:
                status = path.lstat()
            except OSError:
                continue  # removed meanwhile
            if status.st_uid == os.getuid() and (status.st_dev, status.st_ino) not in used:
                found.append((path, 512 * status.st_blocks))
    return sorted(found, key=lambda entry: -entry[1])


def _in_use(root: Path) -> Iterator[tuple[int, int]]:
    """Device and inode of every file that a process has open or mapped, as far as this user may see."""
    for pid in (name for name in names(root / "proc") if name.isdecimal()):
        process = root / "proc" / pid
        for descriptor in names(process / "fd"):
            try:
                status = (process / "fd" / descriptor).stat()
            except OSError:
                continue
            yield status.st_dev, status.st_ino
        try:
            mapped = (process / "maps").read_text(errors="replace")
        except OSError:
            continue
        for line in mapped.splitlines():
            fields = line.split(maxsplit=5)
            if len(fields) == 6 and ":" in fields[3]:
                major, minor = (int(part, 16) for part in fields[3].split(":"))
                yield os.makedev(major, minor), int(fields[4])


CHECK = Check("shm", "limits", "room in /dev/shm, and files that were left there", "node", check)
