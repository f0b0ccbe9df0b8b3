"""What ranks and srun recorded, as faults: who ended how, and what the messages mean.

A rank that raised has recorded its error. One that a signal ended could not: then the end of its log may say
more than the signal does (a GPU that hangs, a memory access fault). If it does not, the cause is unknown.
"""

from __future__ import annotations

import os
import re
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from zslurm.aegis.core.root_cause import is_orderly, reports_lost_peer
from zslurm.aegis.core.step import OF_RANKS
from zslurm.aegis.fault_kinds import (
    CONFIG_ERROR,
    EARLY_EXIT,
    MEMORY_CHANGED,
    NAN_LOSS,
    NUMBERS_WRONG,
    PEER_LOST,
    RANK_EXIT,
    RANK_KILLED,
    SLURM_CANCELLED,
    SLURM_LAUNCH_CONFIG,
    SLURM_STEP_REFUSED,
    STORAGE_FULL,
    TRANSFER_WRONG,
    USER_ERROR,
    FaultKind,
    rule_of,
)
from zslurm.aegis.logs.scanner import faults_in
from zslurm.aegis.logs.signatures import Signatures
from zslurm.aegis.types import Fault, Role, Scope
from zslurm.checkpoint_tools.quantities import show_bytes
from zslurm.core.errors import Exit
from zslurm.core.files import read_json
from zslurm.job.program.ending import CHILD_KILLED
from zslurm.run.run_dir import AttemptDir
from zslurm.slurm.on_nodes.srun_output import TaskFailure, cancelled_step, is_warning

_TAIL = 1 << 16
_FULL_BYTES = 1 << 20
"""With less space free a file system is full: records of a run take less."""
_MOST_LOGS = 64
"""Logs that are read after an attempt: of a thousand ranks that lost a peer, the first few show as much as all."""

_ON_RANK = re.compile(r"\bon rank (\d+)")
_OF_NUMBERS = {
    "Diverged": NAN_LOSS,
    "WrongProduct": NUMBERS_WRONG,
    "ChangedMemory": MEMORY_CHANGED,
    "WrongTransfer": TRANSFER_WRONG,
}
"""Errors of the trainer that every rank reports, and that name the rank on which they began."""


def rank_ends(attempt: AttemptDir) -> list[dict[str, Any]]:
    """Return what the ranks that have ended recorded."""
    return [end for path in sorted(attempt.ranks.glob("*.json")) if (end := read_json(path))]


def forget_former_end(attempt: AttemptDir, rank: int, member: str) -> None:
    """Remove what a process recorded whose place as a rank `member` has taken: the rank has not ended so.

    The new process may be done by now, if the run had only a step to go: its own record stays.
    """
    path = attempt.rank_end(rank)
    if (end := read_json(path)) is not None and end.get("member") != member:
        path.unlink(missing_ok=True)


def faults_of_failure(
    attempt: AttemptDir, failure: TaskFailure, rank_nodes: Sequence[str], signatures: Signatures
) -> list[Fault]:
    """Return a fault for each rank of a failure that srun has just reported; only their records are read."""
    faults: list[Fault] = []
    for count, rank in enumerate(failure.ranks):
        if end := read_json(attempt.rank_end(rank)):
            faults.append(fault_of_end(end, rank_nodes, signatures))
            continue
        faults_in_log = faults_in_rank_log(attempt, rank, failure.node) if count < _MOST_LOGS else []
        faults += faults_in_log or [_unexplained(failure, rank)]
    return faults


def fault_of_end(end: Mapping[str, Any], rank_nodes: Sequence[str], signatures: Signatures) -> Fault:
    """Return as a fault what a rank recorded when it ended badly.

    When the loss diverges or numbers are wrong, every rank names the rank on which it began: that one is meant.
    """
    line = f"{end['error']}: {end['message']}" if end.get("error") else f"exit code {end['exit_code']}"
    kind, role, scope = _meaning(end, line, signatures)
    step, rank, node = int(end.get("step", -1)), int(end["rank"]), str(end["node"])
    began = _ON_RANK.search(line) if kind in _OF_NUMBERS.values() else None
    if began is not None and int(began[1]) < len(rank_nodes):
        rank = int(began[1])
        node = rank_nodes[rank]
    return Fault(
        kind,
        role,
        scope,
        float(end["time"]),
        "rank",
        line,
        node=node,
        rank=rank,
        step=step if step >= 0 else None,
        fingerprint=end.get("fingerprint"),
    )


def _meaning(end: Mapping[str, Any], line: str, signatures: Signatures) -> tuple[FaultKind, Role, Scope]:
    error = end.get("error")
    if error is None:
        return RANK_EXIT, "root", "unknown"
    if error == "SystemExit":
        return (PEER_LOST, "cascade", "fabric") if reports_lost_peer(end) else (EARLY_EXIT, "root", "user")
    if error == CHILD_KILLED:
        return RANK_KILLED, "root", "unknown"
    if end["exit_code"] == Exit.USAGE:
        return CONFIG_ERROR, "root", "user"
    if (kind := _OF_NUMBERS.get(error)) is not None:
        return kind, "root", rule_of(kind).scope
    if reports_lost_peer(end):
        return PEER_LOST, "cascade", "fabric"
    match = signatures.match(line)
    if match is not None and match.role in ("root", "cascade"):
        return match.kind, match.role, match.scope
    return USER_ERROR, "root", "user"


def _unexplained(failure: TaskFailure, rank: int) -> Fault:
    kind = RANK_EXIT if failure.exit_code is not None else RANK_KILLED
    return Fault.of_kind(kind, time.time(), "srun", failure.what, node=failure.node, rank=rank)


def faults_in_rank_log(attempt: AttemptDir, rank: int, node: str | None) -> list[Fault]:
    """Return the roots in the last lines of a rank's log; lines without a stamp count as written just now."""
    now, begun = time.time(), _begun(attempt)
    faults_in_log = faults_in(tail(attempt.rank_log(rank)).splitlines(), "log", node=node, rank=rank)
    return [
        fault if begun <= fault.time <= now else replace(fault, time=now)
        for fault in faults_in_log
        if fault.role == "root" and not fault.cleared
    ]


def faults_in_step_log(attempt: AttemptDir) -> list[Fault]:
    """Return the roots in the last lines of the step itself: why srun could not start it, or ended it.

    Options that srun refuses are the user's only in the first attempt. Later it is Slurm, which still counts
    what an earlier step or a dead node had: "Memory required by task is not available", just after a controller
    came back, or before Slurm has noticed that the node is dead.
    """
    lines = tail(attempt.step_log).splitlines()
    faults_in_log = faults_in([line for line in lines if not is_warning(line.decode("utf-8", "replace"))], "srun")
    roots = [fault for fault in faults_in_log if fault.role == "root" and not fault.cleared]
    if attempt.number == 1:
        return roots
    return [
        replace(fault, kind=SLURM_STEP_REFUSED, scope="scheduler") if fault.kind == SLURM_LAUNCH_CONFIG else fault
        for fault in roots
    ]


def cancelled(attempt: AttemptDir) -> Fault | None:
    """Return the fault that the attempt's Slurm step was cancelled; None if it was not.

    Ask before the supervisor itself ends the step, which srun reports with the same message.
    """
    step = cancelled_step(
        tail(attempt.step_log).decode("utf-8", "replace"), tail(attempt.rank_log(0)).decode("utf-8", "replace")
    )
    if step is None:
        return None
    line = f"the Slurm step {step} was cancelled (scancel)" if step else "the Slurm step was cancelled (scancel)"
    return Fault.of_kind(SLURM_CANCELLED, time.time(), "srun", line, role="root")


def _begun(attempt: AttemptDir) -> float:
    """Return when the attempt was started, UNIX seconds."""
    try:
        return attempt.description.stat().st_mtime
    except OSError:
        return 0.0


def late_faults(
    attempt: AttemptDir, known: Sequence[Fault], rank_nodes: Sequence[str], signatures: Signatures
) -> list[Fault]:
    """Return what ranks recorded and srun did not report, once an attempt is over."""
    named = {fault.rank for fault in known if fault.source in OF_RANKS}
    return [
        fault_of_end(end, rank_nodes, signatures)
        for end in rank_ends(attempt)
        if not is_orderly(end) and end["rank"] not in named
    ]


def full_disk(directory: Path, known: Sequence[Fault]) -> list[Fault]:
    """Return the fault that the file system of a run is full, if nothing else explains the end of an attempt.

    The rank that it ended can write neither its record nor the last lines of its log.
    """
    if any(f.role == "root" and not (f.rule.vague or f.rule.unexplained) for f in known):
        return []
    try:
        space = os.statvfs(directory)
    except OSError:
        return []
    free, no_files = space.f_bavail * space.f_frsize, space.f_files > 0 and space.f_favail == 0
    if free >= _FULL_BYTES and not no_files:
        return []
    what = "no more files can be made" if no_files else f"{show_bytes(free)} free"
    line = f"{directory}: No space left on device ({what})"
    ends = [fault.time for fault in known if fault.role == "root" and fault.source in OF_RANKS]
    return [Fault.of_kind(STORAGE_FULL, min(ends, default=time.time()) - 0.001, "log", line)]


def tail(path: Path, size: int = _TAIL) -> bytes:
    """Return the last bytes of a log; nothing if it cannot be read."""
    try:
        with path.open("rb") as file:
            file.seek(0, 2)
            file.seek(max(0, file.tell() - size))
            return file.read(size)
    except OSError:
        return b""
