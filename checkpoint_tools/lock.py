"""One writer per directory of checkpoints: a lock file that says who holds it.

The file appears by `link`, which is atomic on NFS and Lustre too (flock is not reliable there), complete from the
first moment. Nothing removes it when its holder is killed, so a process that finds one checks whether that one
still lives:

    on this host        its process is there, and is the one that took the lock (pids are used again)
    in the same job     attempts of one job follow each other: the one before is over
    elsewhere           the caller may know (a scheduler's word); otherwise the lock holds

A dead one's lock is replaced only by the process that holds the lock on replacing it: a second file, made by
`link` as well, whose name has the dead lock's nonce. Of many that find the same dead lock one gets that file,
looks whether the dead lock is still there, and renames its own over it. Later ones find a living holder. A
process that dies on the way leaves a second file that is a dead one's lock, too, and is replaced in the same
way.

Cost: one small file. It keeps apart runs that were started twice, not programs that ignore it.
"""

from __future__ import annotations

import json
import os
import secrets
import socket
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path

from zslurm.checkpoint_tools.durable import writing
from zslurm.checkpoint_tools.errors import InUse, read_failed
from zslurm.checkpoint_tools.plain import load_json

NAME = ".lock"


@dataclass(frozen=True, slots=True)
class Holder:
    """Who holds a lock.

    Attributes:
        host, pid: its process.
        started: the kernel's start time of that process, in ticks since boot; 0 where it is not known.
        job: the scheduler's job that it belongs to; empty where there is none.
        since: when it took the lock, in seconds since 1970.
        nonce: distinguishes this holder from any other.
    """

    host: str
    pid: int
    started: int
    job: str
    since: float
    nonce: str

    def __str__(self) -> str:
        job = f" of job {self.job}" if self.job else ""
        since = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(self.since))
        return f"process {self.pid} on {self.host}{job}, since {since}"


IsGone = Callable[[Holder], bool]
"""Whether a holder on another host is certainly dead."""


class Lock:
    """A lock that this process holds."""

    def __init__(self, path: Path, holder: Holder) -> None:
        """Use `take`."""
        self.path, self.holder = path, holder

    def release(self) -> None:
        """Give it back; if somebody took it over meanwhile, leave theirs alone."""
        with suppress(OSError):
            if holder_of(self.path.parent) == self.holder:
                self.path.unlink()


def acquire(root: Path, *, job: str = "", is_gone: IsGone = lambda holder: False) -> Lock:
    """Acquire the lock of `root`.

    Args:
        root: a directory of checkpoints, which is made if need be.
        job: the scheduler's job that this process belongs to.
        is_gone: decides about holders on other hosts, in other jobs.

    Raises:
        InUse: somebody who is not known to be dead holds it.
        WriteFailed, ReadFailed: the file system refused.
    """
    path = root / NAME
    ours = Holder(
        socket.gethostname(), os.getpid(), _start_of(os.getpid()), job, time.time(), secrets.token_hex(8)
    )
    with writing(path):
        root.mkdir(parents=True, exist_ok=True)
        draft = root / f"{NAME}.{ours.nonce}"
        draft.write_text(json.dumps(asdict(ours)))
        try:
            _acquire(path, draft, lambda theirs: _is_dead(theirs, ours, is_gone))
        finally:
            draft.unlink(missing_ok=True)
    return Lock(path, ours)


def _acquire(path: Path, draft: Path, is_dead: Callable[[Holder], bool]) -> None:
    """Make `path` a copy of `draft` where no living process holds it."""
    while not _link(draft, path):
        theirs = _read(path)
        if theirs is None:
            continue  # it was given back between the two looks
        if not is_dead(theirs):
            raise InUse(f"{path.parent} is in use by {theirs}; if that is dead, remove {path}")
        replacing = path.with_name(f"{NAME}.over-{theirs.nonce or 'damaged'}")
        _acquire(replacing, draft, is_dead)
        try:
            if _read(path) == theirs:
                copy = path.with_name(f"{replacing.name}.new")
                copy.write_bytes(draft.read_bytes())
                copy.rename(path)
                return
        finally:
            replacing.unlink(missing_ok=True)


def holder_of(root: Path) -> Holder | None:
    """Who holds the lock of `root`; None where none does. A file that is no lock has no living holder.

    Raises:
        ReadFailed: the operating system refused.
    """
    return _read(root / NAME)


def _read(path: Path) -> Holder | None:
    try:
        return Holder(**load_json(path.read_bytes()))
    except FileNotFoundError:
        return None
    except OSError as cause:
        raise read_failed(path, cause) from cause
    except (TypeError, ValueError):
        return Holder("", 0, 0, "", 0.0, "")


def _link(draft: Path, path: Path) -> bool:
    try:
        os.link(draft, path)
    except FileExistsError:
        return False
    return True


def _is_dead(theirs: Holder, ours: Holder, is_gone: IsGone) -> bool:
    if not theirs.nonce or (theirs.job and theirs.job == ours.job):
        return True
    if theirs.host == ours.host:
        return _start_of(theirs.pid) != theirs.started
    return is_gone(theirs)


def _start_of(pid: int) -> int:
    """When a process of this host started; 0 where there is none, or no /proc."""
    try:
        return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19])
    except (OSError, ValueError, IndexError):
        return 0
