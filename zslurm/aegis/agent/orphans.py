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

import contextlib
import os
import shutil
import signal
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from zslurm.aegis.agent.sensor import NodeContext
from zslurm.aegis.agent.sensors.progress import records
from zslurm.core.processes import read_stat
from zslurm.hardware.gpu_health import USED_BYTES
from zslurm.hardware.gpus import read_gpus
from zslurm.hardware.sysfs import names, read_int
from zslurm.job.step import ATTEMPT_VARIABLE, attempt_mark
from zslurm.run.run_dir import AttemptDir
from zslurm.slurm.environment import NODE_VARIABLE, task_node

PROC = Path("/proc")
"""A test has its own."""

_LOOK_S = 0.1
_DEAD = "ZX"


@dataclass(frozen=True)
class Member:
    """A process of an attempt.

    Attributes:
        started: clock ticks since the boot: with the pid it names one process forever.
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
        """Whether it holds nothing any more: a zombie does, unless a thread of it still lives."""
        return self.state in _DEAD and self.threads <= 1


@dataclass(frozen=True)
class CleanupResult:
    """What a cleanup came to.

    Attributes:
        killed: processes that were sent SIGKILL and are gone.
        left: those that are still there.
        seconds: that it took.
        gpu_used: memory in use on each GPU, bytes; empty if that is unknown.
        gpu_released: whether it is no more than an idle GPU's; None if that is unknown.
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


def clean_up(
    context: NodeContext, attempt: AttemptDir, *, kill: bool, limit_s: float | None = None
) -> CleanupResult:
    """End every process of an attempt on this node; wait until all are gone and the GPUs' memory is released.

    Args:
        context: this node.
        attempt: whose ranks are meant.
        kill: otherwise what is there is only reported: nothing is killed, waited for or removed.
        limit_s: patience; default: aegis.teardown_s.
    """
    began = time.monotonic()
    deadline = began + (context.aegis.teardown_s if limit_s is None else limit_s)
    seen: dict[tuple[int, int], Member] = {}
    while True:
        seen |= {(member.pid, member.started): member for member in members(context, attempt)}
        remaining = [now for member in seen.values() if (now := _again(member)) is not None]
        if not kill or not remaining or time.monotonic() > deadline:
            break
        for member in remaining:
            with contextlib.suppress(OSError):  # gone, or may not be killed: the next look shows it
                os.kill(member.pid, signal.SIGKILL)
        time.sleep(_LOOK_S)
    used = gpu_memory(context.root)
    while kill and not remaining and _is_held(used) and time.monotonic() < deadline:
        time.sleep(_LOOK_S)
        used = gpu_memory(context.root)
    progress = attempt.progress(context.environ)
    if kill and not remaining:  # by its record alone a thread is found whose process is a zombie
        shutil.rmtree(progress, ignore_errors=True)
    stayed = {(member.pid, member.started) for member in remaining}
    return CleanupResult(
        killed=tuple(member for key, member in seen.items() if kill and key not in stayed),
        left=tuple(remaining),
        seconds=time.monotonic() - began,
        gpu_used=tuple(used.values()),
        gpu_released=None if not used else not _is_held(used),
        progress_removed=not progress.exists(),
    )


def members(context: NodeContext, attempt: AttemptDir) -> list[Member]:
    """Return the processes of an attempt on this node that are not gone."""
    pids = [int(name) for name in names(PROC) if name.isdecimal()]
    everything = {pid: member for pid in pids if (member := read_member(pid)) is not None}
    own_pids = {pid for pid in everything if carries_mark(pid, attempt, context.environ)}
    # Of some ranks only threads are left: the leader is a zombie and has no environment any more.
    with contextlib.suppress(OSError):
        recorded = {record.pid for record in records(attempt.progress(context.environ))}
        own_pids |= {pid for pid in recorded if pid in everything and everything[pid].state in _DEAD}
    children: dict[int, list[int]] = {}
    for member in everything.values():
        children.setdefault(member.parent, []).append(member.pid)
    unseen = list(own_pids)
    while unseen:
        below = [pid for pid in children.get(unseen.pop(), []) if pid not in own_pids]
        own_pids |= set(below)
        unseen += below
    own_pids -= _ourselves(everything)
    return [everything[pid] for pid in sorted(own_pids) if not everything[pid].is_gone]


def carries_mark(pid: int, attempt: AttemptDir, environ: Mapping[str, str]) -> bool:
    """Return whether a process was started as part of an attempt, on the node of `environ`."""
    try:
        variables = (PROC / str(pid) / "environ").read_bytes().split(b"\0")
    except OSError:
        return False
    if os.fsencode(f"{ATTEMPT_VARIABLE}={attempt_mark(attempt)}") not in variables:
        return False
    nodes = [variable for variable in variables if variable.startswith(os.fsencode(f"{NODE_VARIABLE}="))]
    own_node = task_node(environ)
    return not nodes or own_node is None or os.fsencode(f"{NODE_VARIABLE}={own_node}") in nodes


def read_member(pid: int) -> Member | None:
    """Return a process as /proc shows it; None if it is gone."""
    if (stat := read_stat(PROC / str(pid))) is None or len(stat[1]) < 20:
        return None
    name, fields = stat
    return Member(pid, int(fields[1]), int(fields[19]), fields[0], name, int(fields[17]))


def gpu_memory(root: Path) -> dict[str, int]:
    """Return memory in use on each GPU, bytes, by PCI address; without those if that is unknown."""
    used: dict[str, int] = {}
    for gpu in read_gpus(root):
        if gpu.pci is not None:
            held = read_int(root / "sys/bus/pci/devices" / gpu.pci / "mem_info_vram_used")
            used |= {gpu.pci: held} if held is not None else {}
    return used


def _is_held(used: Mapping[str, int]) -> bool:
    """Return whether a GPU's memory is in use beyond what the doctor grants an idle one."""
    return any(held >= USED_BYTES for held in used.values())


def _ourselves(everything: Mapping[int, Member]) -> set[int]:
    """Return this process and those that it descends from."""
    ancestors, pid = set(), os.getpid()
    while pid in everything and pid not in ancestors:
        ancestors.add(pid)
        pid = everything[pid].parent
    return ancestors


def _again(member: Member) -> Member | None:
    """Return the same process as it is now; None if it is gone."""
    now = read_member(member.pid)
    return None if now is None or now.started != member.started or now.is_gone else now
