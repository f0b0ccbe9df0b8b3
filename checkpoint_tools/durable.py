"""The few file operations that a save is made of, and the seam through which tests stop it.

A name is durable when its file was synced before the rename and the directory after it; nothing here relies
on close. Every OSError leaves as `WriteFailed` or `NoSpace` with the path in it. Interrupted calls (EINTR)
are retried by Python itself, short writes by `write_all`. A failed fsync is never retried: after one, the
kernel may have dropped the pages and report success (the save is given up instead).
"""

from __future__ import annotations

import errno
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from zslurm.checkpoint_tools.errors import write_failed

At = Callable[[str], None]
"""Called with the name of each point that a save passes; a test's version kills the process there."""


def no_fault_hook(point: str) -> None:
    """Stop at no point: what production uses."""


@contextmanager
def writing(path: Path) -> Iterator[None]:
    """Turn any OSError inside into the `WriteFailed` that names `path`."""
    try:
        yield
    except OSError as cause:
        raise write_failed(path, cause) from cause


def write_all(descriptor: int, pieces: list[memoryview]) -> None:
    """Write `pieces` (of bytes, none empty) in order, however little each call takes; empties the list."""
    while pieces:
        written = os.writev(descriptor, pieces)
        while pieces and written >= len(pieces[0]):
            written -= len(pieces.pop(0))
        if written:
            pieces[0] = pieces[0][written:]


def sync(path: Path) -> None:
    """Make a file's bytes durable, or the names in a directory if the file system can (EINVAL: it cannot)."""
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    except OSError as cause:
        if cause.errno != errno.EINVAL or not path.is_dir():
            raise
    finally:
        os.close(descriptor)


def replace_durably(new: Path, path: Path) -> None:
    """Rename a file that is written to `path`: whatever happens, the old or the new one is there, whole.

    Raises:
        OSError: it cannot be synced or renamed.
    """
    sync(new)
    new.replace(path)
    sync(path.parent)


def remove(path: Path) -> None:
    """Delete a file or tree as far as possible; what resists (busy on NFS) is left for a later sweep."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)
