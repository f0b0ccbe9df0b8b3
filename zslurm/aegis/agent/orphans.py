"""Ends what is left of an attempt on this node, and makes sure that it is gone and its memory released.

A process belongs to an attempt if it carries ATTEMPT_VARIABLE in its environment, which each rank is started with
and hands down, or descends from one that does. Never by its name: another run may be here. The process that holds
the Slurm step, the supervisor and the agents do not carry it. Several nodes of a test share one /proc: there
SLURMD_NODENAME, which Slurm sets for each task, shows whose a process is.

A process that was killed may not be gone: a thread of it waits in a driver (state D), and its memory is held. Then
even its leader may be a zombie already, and no longer have an environment; it is still known from the look before,
or from the ranks' own records. What is left at the end is reported, never assumed away.
"""

from __future__ import annotations

import os
import shutil
import signal
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from zslurm.aegis.agent.sensor import Place
from zslurm.aegis.agent.sensors.progress import records
from zslurm.core.files import read_text
from zslurm.hardware.gpus import read_gpus
from zslurm.hardware.sysfs import names, read_int
from zslurm.job.step import ATTEMPT_VARIABLE, attempt_mark
from zslurm.run.run_dir import AttemptDir

_PROC = Path("/proc")
_LOOK_S = 0.1
_GIB = 1 << 30
_DEAD = "ZX"


@dataclass(frozen=True)
class Member:
    """A process of an attempt.

    Attributes:
        started: clock ticks since the boot: with the pid it names one process for ever.
        state: the letter of /proc: R, S, D (waits for a device, cannot be killed), Z (zombie), T (stopped), ...
        threads: that are alive, or not collected yet.
    """

    pid: int
    parent: int
    started: int
    state: str
    name: str
    threads: int

    @property
    def is_gone(self) -> bool:
        """A zombie holds nothing any more, unless a thread of it still lives."""
        return self.state in _DEAD and self.threads <= 1


@dataclass(frozen=True)
class CleanupResult:
    """What a cleanup came to.

    Attributes:
        killed: processes that were sent SIGKILL and are gone.
        left: those that are still there.
        seconds: that it took.
        gpu_used: memory in use on each GPU, bytes; empty where that is unknown.
        gpu_released: whether it is no more than that of an idle GPU; None where that is unknown.
        progress_removed: whether the ranks' records are gone.
    """

    killed: tuple[Member, ...] = ()
    left: tuple[Member, ...] = ()
    seconds: float = 0.0
    gpu_used: tuple[int, ...] = ()
    gpu_released: bool | None = None
    progress_removed: bool = True

    @property
    def clean(self) -> bool:
        """Whether the next attempt may start here."""
        return not self.left and self.gpu_released is not False


def clean_up(place: Place, attempt: AttemptDir, *, kill: bool, limit_s: float | None = None) -> CleanupResult:
    """End every process of an attempt on this node; wait until all are gone and the GPUs' memory is released.

    Args:
        place: this node.
        attempt: whose ranks are meant.
        kill: otherwise nothing is killed, waited for or removed: what is there is only reported.
        limit_s: patience; default: aegis.teardown_s.
    """
    began = time.monotonic()
    deadline = began + (place.aegis.teardown_s if limit_s is None else limit_s)
    seen: dict[tuple[int, int], Member] = {}
    while True:
        seen |= {(member.pid, member.started): member for member in members(place, attempt)}
        left = [now for member in seen.values() if (now := _again(member)) is not None]
        if not kill or not left or time.monotonic() > deadline:
            break
        for member in left:
            _kill(member)
        time.sleep(_LOOK_S)
    used = gpu_memory(place.root)
    while kill and not left and _is_held(place, used) and time.monotonic() < deadline:
        time.sleep(_LOOK_S)
        used = gpu_memory(place.root)
    progress = attempt.progress(place.environ)
    if kill and not left:  # by its record alone a thread is found whose process is a zombie
        shutil.rmtree(progress, ignore_errors=True)
    stayed = {(member.pid, member.started) for member in left}
    return CleanupResult(
        killed=tuple(member for key, member in seen.items() if kill and key not in stayed),
        left=tuple(left),
        seconds=time.monotonic() - began,
        gpu_used=tuple(used.values()),
        gpu_released=None if not used else not _is_held(place, used),
        progress_removed=not progress.exists(),
    )


def members(place: Place, attempt: AttemptDir) -> list[Member]:
    """Return the processes of an attempt on this node that are not gone."""
    everything = {member.pid: member for member in _processes()}
    mine = _marked(everything, attempt, place.environ) | _by_record(everything, place, attempt)
    children: dict[int, list[int]] = {}
    for member in everything.values():
        children.setdefault(member.parent, []).append(member.pid)
    unseen = list(mine)
    while unseen:
        below = [pid for pid in children.get(unseen.pop(), []) if pid not in mine]
        mine |= set(below)
        unseen += below
    mine -= _ourselves(everything)
    return [everything[pid] for pid in sorted(mine) if not everything[pid].is_gone]


def carries_mark(pid: int, attempt: AttemptDir, environ: Mapping[str, str]) -> bool:
    """Return whether a process was started as part of an attempt, on the node of `environ`."""
    try:
        words = (_PROC / str(pid) / "environ").read_bytes().split(b"\0")
    except OSError:
        return False
    if os.fsencode(f"{ATTEMPT_VARIABLE}={attempt_mark(attempt)}") not in words:
        return False
    nodes = [word for word in words if word.startswith(b"SLURMD_NODENAME=")]
    mine = environ.get("SLURMD_NODENAME")
    return not nodes or mine is None or os.fsencode(f"SLURMD_NODENAME={mine}") in nodes


def read_member(pid: int) -> Member | None:
    """A process from /proc/PID/stat; None where it is gone. The second field is a name, and may hold anything."""
    head, _, rest = (read_text(_PROC / str(pid) / "stat") or "").rpartition(")")
    fields = rest.split()
    if len(fields) < 20:
        return None
    return Member(
        pid=pid,
        parent=int(fields[1]),
        started=int(fields[19]),
        state=fields[0],
        name=head.partition("(")[2],
        threads=int(fields[17]),
    )


def gpu_memory(root: Path) -> dict[str, int]:
    """Return memory in use on each GPU, bytes, by PCI address; without those where that is unknown."""
    used: dict[str, int] = {}
    for gpu in read_gpus(root):
        if gpu.pci is not None:
            held = read_int(root / "sys/bus/pci/devices" / gpu.pci / "mem_info_vram_used")
            used |= {gpu.pci: held} if held is not None else {}
    return used


def _is_held(place: Place, used: Mapping[str, int]) -> bool:
    """Return whether a GPU's memory is in use beyond what the doctor grants an idle one."""
    return any(held >= place.cluster.doctor.vram_used_gib * _GIB for held in used.values())


def _processes() -> Iterator[Member]:
    for name in names(_PROC):
        if name.isdecimal() and (found := read_member(int(name))) is not None:
            yield found


def _marked(everything: Mapping[int, Member], attempt: AttemptDir, environ: Mapping[str, str]) -> set[int]:
    return {pid for pid in everything if carries_mark(pid, attempt, environ)}


def _by_record(everything: Mapping[int, Member], place: Place, attempt: AttemptDir) -> set[int]:
    """Ranks of which only threads are left: the leader is a zombie and has no environment any more."""
    try:
        recorded = {record.pid for record in records(attempt.progress(place.environ))}
    except OSError:
        return set()
    return {pid for pid in recorded if pid in everything and everything[pid].state in _DEAD}


def _ourselves(everything: Mapping[int, Member]) -> set[int]:
    """This process and those that it descends from."""
    found, pid = set(), os.getpid()
    while pid in everything and pid not in found:
        found.add(pid)
        pid = everything[pid].parent
    return found


def _again(member: Member) -> Member | None:
    """Return the same process as it is now; None where it is gone."""
    now = read_member(member.pid)
    return None if now is None or now.started != member.started or now.is_gone else now


def _kill(member: Member) -> None:
    """SIGKILL. What may not be killed, or went meanwhile, is found by the next look."""
    try:
        os.kill(member.pid, signal.SIGKILL)
    except OSError:
        return
