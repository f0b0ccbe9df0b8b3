"""Checks of the limits of a process inside the step: memory that it may pin, files, processes, /dev/shm."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from pathlib import Path

from zslurm.checkpoint_tools.quantities import counted, show_bytes
from zslurm.core.files import read_text
from zslurm.doctor.check import CheckOutcome, check, failed, first_few, passed, unavailable, warned, worst
from zslurm.hardware.node_sources import Sources
from zslurm.hardware.sysfs import names

_GIB, _MIB = 1 << 30, 1 << 20

_FAR_TOO_FEW = 1 / 16
"""A limit below this share of what is wanted is a failure rather than a warning."""


@check("limits", "memory that a process inside the step may pin", "node")
def memlock(sources: Sources) -> CheckOutcome:
    """Look at the limit of this very process, which has the limits of ranks, for RDMA.

    The login shell looks fine while the step inherits slurmd's limit (NVIDIA/nccl-tests#206, NVIDIA/nccl#1191).
    """
    limit, needed_gib, cluster = sources.facts.memlock, sources.limits.memlock_gib, sources.cluster
    if limit is None:
        return unavailable("/proc/self/limits cannot be read")
    if limit == "unlimited":
        return passed("memlock is unlimited")
    shown = f"memlock is {show_bytes(limit)}"
    if not (cluster.nics or cluster.rdma_network or sources.facts.nics):
        return passed(f"{shown}; there is no RDMA device that needs more")
    if limit >= needed_gib * _GIB:
        return passed(shown)
    remedy = "ask for LimitMEMLOCK=infinity in slurmd's unit and PropagateResourceLimitsExcept=MEMLOCK"
    return failed(f"{shown}, {needed_gib:g} GiB needed", remedy)


@check("limits", "open files, processes and threads (nofile, nproc)", "node")
def ulimits(sources: Sources) -> CheckOutcome:
    """Look at open files and processes, as /proc/self/limits has them."""
    text = read_text(sources.path("/proc/self/limits")) or ""
    rows = dict(re.findall(r"^Max (open files|processes)\s+(\d+|unlimited)", text, re.MULTILINE))
    if len(rows) < 2:
        return unavailable("/proc/self/limits cannot be read")
    problems = []
    for what, least, name in (
        ("open files", sources.limits.open_files, "nofile"),
        ("processes", sources.limits.processes, "nproc"),
    ):
        if rows[what] != "unlimited" and int(rows[what]) < least:
            outcome = failed if int(rows[what]) < least * _FAR_TOO_FEW else warned
            remedy = f"raise {name}: LimitNOFILE and LimitNPROC in slurmd's unit, or `ulimit` in cluster.setup"
            problems.append(outcome(f"{rows[what]} {what}, {least:g} wanted", remedy))
    return worst(problems, ", ".join(f"{rows[what]} {what}" for what in ("open files", "processes")))


@check("limits", "room in /dev/shm, and files that were left there", "node")
def shm(sources: Sources) -> CheckOutcome:
    """Look at the free space, and at this user's files that no process has open or mapped; small ones are fine."""
    shm_path = sources.path("/dev/shm")
    try:
        space = os.statvfs(shm_path)
    except OSError as error:
        return unavailable(f"/dev/shm: {error.strerror}", "mount a tmpfs there")
    free = space.f_bavail * space.f_frsize
    problems = []
    if free < sources.limits.shm_gib * _GIB:
        text = f"/dev/shm has {show_bytes(free)} free, {sources.limits.shm_gib:g} GiB needed"
        problems.append(failed(text, "remove what is left there, or mount it with a larger size"))
    stale = _stale(sources.root, shm_path)
    total = sum(size for _, size in stale)
    if total >= _MIB:
        named = first_few([path.name for path, _ in stale])
        text = f"{counted(len(stale), 'file')} of yours that no process uses, {show_bytes(total)}: {named}"
        problems.append(warned(text, "remove them from /dev/shm of these nodes (srun -w NODES rm ...)"))
    return worst(problems, f"{show_bytes(free)} free")


def _stale(root: Path, place: Path) -> list[tuple[Path, int]]:
    """Return this user's files there that none of their processes uses, with their bytes, largest first."""
    used = set(_in_use(root))
    stale_files = []
    for folder, _, files in os.walk(place):
        for name in files:
            path = Path(folder) / name
            try:
                status = path.lstat()
            except OSError:
                continue  # removed since it was listed
            if status.st_uid == os.getuid() and (status.st_dev, status.st_ino) not in used:
                stale_files.append((path, 512 * status.st_blocks))
    return sorted(stale_files, key=lambda entry: -entry[1])


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
                major, minor = (int(number, 16) for number in fields[3].split(":"))
                yield os.makedev(major, minor), int(fields[4])
