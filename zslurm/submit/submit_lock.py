"""One submission of a run at a time: a lock file beside its directory, made with O_EXCL.

Between the look whether a run is active and the moment in which its new job can be seen, a second submission
would start it twice. The lock holds the process that submits. Where that one died on this machine the lock is
taken over; whether a process on another machine lives is not known, so the message names the file.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from zslurm.core.errors import RunActive
from zslurm.core.processes import ProcessRecord
from zslurm.run.run_dir import RunDir, not_writable


def lock_path(run: RunDir) -> Path:
    """Beside the run's directory, which `submit --new` moves away."""
    return run.path.with_name(f".{run.name}.submitting")


@contextmanager
def submit_lock(run: RunDir) -> Iterator[None]:
    """Hold the right to submit `run`.

    Raises:
        RunActive: another process submits it at this moment.
        ConfigError: the directory of the runs cannot be made or is not writable.
    """
    lock = lock_path(run)
    try:
        run.path.parent.mkdir(parents=True, exist_ok=True)
        taken = _take(lock) or (_remove_stale(lock) and _take(lock))
    except OSError as error:
        raise not_writable(error, run.path.parent) from error
    if not taken:
        owner = ProcessRecord.read(lock)
        who = f"process {owner.pid} on {owner.host}" if owner else "another process"
        raise RunActive(
            f"{run.name}: {who} is submitting the run at this moment; if that is not so any more, remove {lock}"
        )
    try:
        yield
    finally:
        lock.unlink(missing_ok=True)


def _take(lock: Path) -> bool:
    try:
        os.close(os.open(lock, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600))
    except FileExistsError:
        return False
    ProcessRecord.of(os.getpid()).write(lock)
    return True


def _remove_stale(lock: Path) -> bool:
    """Remove the lock of a process that died on this machine; False where it is none."""
    owner = ProcessRecord.read(lock)
    if owner is None or not owner.here or owner.alive:
        return False
    aside = lock.with_name(f"{lock.name}.{os.getpid()}")
    with contextlib.suppress(FileNotFoundError):
        lock.rename(aside)
        if ProcessRecord.read(aside) != owner:  # another process was quicker, and this is its lock
            aside.rename(lock)
            return False
        aside.unlink()
    return True
