"""The host: free memory, processes that the kernel killed for want of it, zombies, load.

Kills are counted by the job's own cgroup if there is one (v2: memory.events, which counts for all below it; v1:
memory.oom_control of each cgroup below the job's: Documentation/admin-guide/cgroup-v2.rst, cgroup-v1/memory.rst).
/proc/vmstat counts them for the whole host, of any job and user: such a kill is reported, but is no root cause.
Kills since the attempt began count, whichever agent looks; the other states are reported by the first look of each
agent.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter

from zslurm.aegis.agent.sensor import NodeContext, Reading, Sensor
from zslurm.aegis.fault_kinds import HOST_OOM, MEMORY_LOW, ZOMBIES
from zslurm.aegis.types import Fault
from zslurm.checkpoint_tools.quantities import counted, show_bytes
from zslurm.core.files import read_text
from zslurm.core.processes import read_stat
from zslurm.hardware.page_cache import parse_meminfo
from zslurm.hardware.sysfs import key_values, names

_GIB = 1 << 30
_LOW_MEMORY = 0.03
"""Less free memory than this share of the host is advised about."""
# A job's cgroup: since Slurm 26.05, with cgroup v2 the SLUID unless cgroup.conf has CgroupJobIdPaths=yes.
_JOB = re.compile(r"job_\d+|s[0-9A-HJKMNP-TV-Z]{13}")
_MANY_ZOMBIES = 20
_MEMORY = TypeAdapter(dict[str, int])
_ZOMBIES_EVERY = 12
"""Looks at the host for each look at every process, which takes longer than all else together."""


class Host(Sensor):
    """Watches memory and processes."""

    def __init__(self, context: NodeContext) -> None:
        super().__init__(context)
        self._kills: dict[str, int] = {}
        self._began: dict[str, int] = {}
        self._looks = 0

    def begin_attempt(self) -> None:
        """Count kills from the last look."""
        self._began = dict(self._kills)

    def memory(self) -> Any:
        """Return how many kills were counted when the attempt began, by who counts."""
        return self._began

    def recall(self, memory: Any) -> None:
        """See Sensor."""
        self._began = _MEMORY.validate_python(memory)
        self._kills = dict(self._began)

    def read(self) -> Reading:
        """Return faults for new kills, and if memory or zombies cross their limits."""
        proc = self.context.root / "proc"
        memory = parse_meminfo(key_values(proc / "meminfo"))
        kills = oom_kills(self.context.root)
        if memory is None and not kills:
            return Reading(ok=False, why=f"{proc}/meminfo cannot be read")
        faults, values = self._killed(kills), {"oom_kills": max(kills.values(), default=0)}
        measured: dict[str, float] = dict(values)
        if memory is not None:
            free, total = memory
            measured |= {"memory_free_gib": round(free / _GIB, 1), "memory_gib": round(total / _GIB, 1)}
            line = f"{show_bytes(free)} of {show_bytes(total)} of memory are free"
            is_low = free < _LOW_MEMORY * total
            faults += self.state_fault(MEMORY_LOW, "host", is_low, line)
        if (load := (read_text(proc / "loadavg") or "").split()[:1]) and load[0].replace(".", "").isdigit():
            measured["load"] = float(load[0])
        if self._looks % _ZOMBIES_EVERY == 0:
            count = zombies(proc, os.getuid())
            line = f"{counted(count, 'zombie')} of this user"
            faults += self.state_fault(ZOMBIES, "host", count >= _MANY_ZOMBIES, line)
        self._looks += 1
        return Reading(faults=tuple(faults), values=measured)

    def _killed(self, kills: dict[str, int]) -> list[Fault]:
        """Return new kills. Only kills in the job can be why its ranks ended."""
        before, self._kills = self._kills, {**self._kills, **kills}
        for where, count in kills.items():
            self._began.setdefault(where, count)
        new = {where: count - before[where] for where, count in kills.items() if count > before.get(where, count)}
        whose = next((name for name in ("job", "host") if name in new), None)
        if whose is None:
            return []
        line = f"the kernel killed {counted(new[whose], 'process')} of the {whose}: out of memory"
        role = "root" if whose == "job" else "advisory"
        return [self.context.fault(HOST_OOM, "host", line, role=role, scope="node")]


def oom_kills(root: Path) -> dict[str, int]:
    """Return processes killed so far: of the `job` (if it has a cgroup that counts), of the `host`."""
    kills = {}
    for kind, directory in cgroups_of_job(root, read_text(root / "proc/self/cgroup") or ""):
        files = [directory / "memory.events"] if kind == "v2" else _oom_controls(directory)
        counts = [count for file in files if (count := _kill_count(file)) is not None]
        if counts:
            kills["job"] = sum(counts)
            break
    if (host := _kill_count(root / "proc/vmstat")) is not None:
        kills["host"] = host
    return kills


def cgroups_of_job(root: Path, text: str) -> list[tuple[str, Path]]:
    """Return the cgroups that count the memory of this Slurm job, by /proc/self/cgroup; empty outside a job."""
    groups = []
    for line in text.splitlines():
        _, _, remainder = line.partition(":")
        controllers, _, path = remainder.partition(":")
        parts = path.strip("/").split("/")
        at = next((index for index, path_part in enumerate(parts) if _JOB.fullmatch(path_part)), None)
        if at is None or controllers not in ("", "memory"):
            continue
        kind, mount = ("v1", "sys/fs/cgroup/memory") if controllers else ("v2", "sys/fs/cgroup")
        groups.append((kind, root.joinpath(mount, *parts[: at + 1])))
    return groups


def _oom_controls(directory: Path) -> Iterable[Path]:
    """Return the files of a v1 cgroup and of those below it: each counts its own kills only. Steps, then tasks."""
    yield directory / "memory.oom_control"
    for step in names(directory):
        yield directory / step / "memory.oom_control"
        for task in names(directory / step) if step.startswith("step_") else ():
            yield directory / step / task / "memory.oom_control"


def _kill_count(file: Path) -> int | None:
    text = key_values(file).get("oom_kill", "")
    return int(text) if text.isdecimal() else None


def zombies(proc: Path, uid: int) -> int:
    """Return processes of a user that ended and were not collected by their parents."""
    own_processes = [proc / pid for pid in names(proc) if pid.isdecimal() and _owner(proc / pid) == uid]
    return sum((stat := read_stat(process)) is not None and stat[1][0] == "Z" for process in own_processes)


def _owner(process: Path) -> int | None:
    try:
        return process.stat().st_uid
    except OSError:
        return None


make = Host
