"""One submission of a run at a time.

Between the look whether a run is active and the moment in which its new job can be seen, a second submission would
start it twice. The lock is the one of checkpoint directories (checkpoint_tools/lock.py), in a directory next to
the run's, which `submit --new` moves away. A lock whose process died on this machine is replaced; whether a
process on another machine lives is not known, so the message names the file.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from zslurm.checkpoint_tools import InUse, Lock, acquire, holder_of
from zslurm.checkpoint_tools.errors import WriteFailed
from zslurm.core.errors import RunActive
from zslurm.run.run_dir import RunDir, not_writable


def lock_dir(run: RunDir) -> Path:
    """Return the directory of the lock, which exists while a process holds it."""
    return run.path.with_name(f".{run.name}.submit-lock")


@contextmanager
def submit_lock(run: RunDir) -> Iterator[None]:
    """Hold the right to submit `run`.

    Raises:
        RunActive: another process submits it at this moment.
        ConfigError: the directory of the runs cannot be made or is not writable.
    """
    lock = _acquire(run)
    try:
        yield
    finally:
        lock.release()
        with suppress(OSError):  # not empty: another process is about to acquire it
            lock_dir(run).rmdir()


def _acquire(run: RunDir, tries: int = 100) -> Lock:
    try:
        return acquire(lock_dir(run))
    except InUse as error:
        holder = holder_of(lock_dir(run))
        who = f"process {holder.pid} on {holder.host}" if holder else "another process"
        raise RunActive(
            f"{run.name}: {who} is submitting the run at this moment; if that is not so any more, remove "
            f"{lock_dir(run)}"
        ) from error
    except WriteFailed as error:
        cause = error.__cause__
        # The last holder may remove the directory just when it is needed: then it is made again.
        if tries and isinstance(cause, FileNotFoundError | FileExistsError):
            return _acquire(run, tries - 1)
        assert isinstance(cause, OSError)
        raise not_writable(cause, run.path.parent) from error
