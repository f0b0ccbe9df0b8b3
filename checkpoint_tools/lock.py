"""A lock file that names its holder: one writer per directory of checkpoints, or of anything else.

The file appears by `link`, which is atomic on NFS and Lustre too (flock is not reliable there), complete from the
first moment. A holder that is killed leaves it behind, so a process that finds one decides whether its holder
is dead:

    on this host        dead unless its process is there, and is the one that acquired it (pids are used again)
    in the same job     dead: attempts of one job follow each other
    elsewhere           the caller may know (from a scheduler, from the file's age); otherwise alive

A dead holder's lock is replaced only by the process that holds the lock on replacing it: a second file, made by
`link` as well, whose name has the dead lock's nonce. Of many that find the same dead lock one gets that file,
looks whether the dead lock is still there, and renames its own over it. Later ones find a living holder. A
process that dies on the way leaves a second file that is a dead holder's lock, too, and is replaced in the same
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
from zslurm.checkpoint_tools.plain import StrPath, load_json

NAME = ".lock"


@dataclass(frozen=True, slots=True)
class Holder:
    """Who holds a lock.

    Attributes:
        host, pid: its process.
        started: the kernel's start time of that process, in ticks since boot; 0 if unknown.
        job: the scheduler's job that it belongs to; empty if there is none.
        since: when it acquired the lock, in seconds since 1970.
        nonce: distinguishes this holder from any other; empty if the file is no lock.
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

    @classmethod
    def of_lock(cls, path: Path) -> Holder | None:
        """Return who holds the lock file at `path`, None if there is no file; raises OSError."""
        try:
            return cls(**load_json(path.read_bytes()))
        except FileNotFoundError:
            return None
        except (TypeError, ValueError):
            return cls("", 0, 0, "", 0.0, "")


IsGone = Callable[[Holder], bool]
"""Returns whether a holder on another host, in another job, is certainly dead."""


@dataclass(frozen=True)
class Lock:
    """A lock file that this process holds; as a context manager it is released at the end."""

    path: Path
    holder: Holder

    @classmethod
    def acquire(
        cls,
        path: Path,
        owned: str,
        *,
        job: str = "",
        is_gone: IsGone = lambda holder: False,
        take_over: bool = False,
    ) -> Lock:
        """Make the lock file `path`, in a directory that exists, or take it over from a dead holder.

        `owned` names what the lock is for in the message of `InUse`; `job` is the scheduler's job that this
        process belongs to. With `take_over` any holder counts as dead: this process was made to take its place,
        and the holder ends without touching anything should it still be there (train/recovery).

        Raises:
            InUse: a holder that is not known to be dead has it.
            OSError: the file system refused.
        """
        own_holder = Holder(
            host=socket.gethostname(),
            pid=os.getpid(),
            started=process_start(os.getpid()) or 0,
            job=job,
            since=time.time(),
            nonce=secrets.token_hex(8),
        )
        draft = path.with_name(f"{path.name}.{own_holder.nonce}")
        draft.write_text(json.dumps(asdict(own_holder)))
        try:
            _acquire(path, draft, owned, lambda theirs: take_over or _is_dead(theirs, own_holder, is_gone))
        finally:
            draft.unlink(missing_ok=True)
        return cls(path, own_holder)

    def release(self) -> None:
        """Remove the file, unless another process has taken it over."""
        with suppress(OSError):
            if Holder.of_lock(self.path) == self.holder:
                self.path.unlink()

    def __enter__(self) -> Lock:
        return self

    def __exit__(self, *error: object) -> None:
        self.release()


def acquire(
    root: StrPath, *, job: str = "", is_gone: IsGone = lambda holder: False, take_over: bool = False
) -> Lock:
    """Acquire the lock of `root`, a directory of checkpoints, which is made if need be; see `Lock.acquire`.

    Raises:
        InUse: a holder that is not known to be dead has it.
        WriteFailed: the file system refused.
    """
    root = Path(root)
    with writing(root / NAME):
        root.mkdir(parents=True, exist_ok=True)
        return Lock.acquire(root / NAME, str(root), job=job, is_gone=is_gone, take_over=take_over)


def holder_of(root: StrPath) -> Holder | None:
    """Return who holds the lock of `root`; None if there is no lock.

    Raises:
        ReadFailed: the operating system refused.
    """
    root = Path(root)
    try:
        return Holder.of_lock(root / NAME)
    except OSError as cause:
        raise read_failed(root / NAME, cause) from cause


def process_start(pid: int) -> int | None:
    """Return when a process of this host started, in clock ticks since the boot; None if there is none."""
    try:
        text = Path(f"/proc/{pid}/stat").read_bytes()
    except OSError:
        return None
    return int(text.rpartition(b")")[2].split()[19])  # the second field is a name, and may hold anything


def _acquire(path: Path, draft: Path, owned: str, is_dead: Callable[[Holder], bool]) -> None:
    """Make `path` a copy of `draft` if no living process holds it."""
    while True:
        with suppress(FileExistsError):
            os.link(draft, path)
            return
        theirs = Holder.of_lock(path)
        if theirs is None:
            continue  # it was released between the two looks
        if not is_dead(theirs):
            raise InUse(f"{owned} is in use by {theirs}; if that is dead, remove {path}")
        replacing = path.with_name(f"{path.name}.over-{theirs.nonce or 'damaged'}")
        _acquire(replacing, draft, owned, is_dead)
        try:
            if Holder.of_lock(path) == theirs:
                copy = path.with_name(f"{replacing.name}.new")
                copy.write_bytes(draft.read_bytes())
                copy.rename(path)
                return
        finally:
            replacing.unlink(missing_ok=True)


def _is_dead(theirs: Holder, ours: Holder, is_gone: IsGone) -> bool:
    if not theirs.nonce or (theirs.job and theirs.job == ours.job):
        return True
    if theirs.host == ours.host:
        return (process_start(theirs.pid) or 0) != theirs.started
    return is_gone(theirs)
