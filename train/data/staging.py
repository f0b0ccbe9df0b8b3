"""A directory that appears complete or not at all.

It is filled under a hidden name beside its final one (.NAME.building-HOST-PID) and renamed when all its files
are on stable storage. Failure and interruption remove the hidden one; after a kill it stays until the next
`staging_directory` of the same NAME on the same host, which removes those of processes that are gone.
"""

from __future__ import annotations

import os
import shutil
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from train.data.writer import fsync
from train.errors import DataError


@contextmanager
def staging_directory(final: Path) -> Iterator[Path]:
    """An empty directory to fill; it becomes `final` at the end of the body, or vanishes on an exception.

    The body sees to the durability of its files; the renames are made durable here.

    Raises:
        DataError: this process is already filling one for `final`, or `final` was filled meanwhile.
    """
    prefix = f".{final.name}.building-{socket.gethostname()}-"
    final.parent.mkdir(parents=True, exist_ok=True)
    _remove_leavings(final.parent, prefix)
    staging = final.parent / f"{prefix}{os.getpid()}"
    try:
        staging.mkdir()
    except FileExistsError:
        raise DataError(f"{final}: is being built by this very process") from None
    try:
        yield staging
        fsync(staging)
        _publish(staging, final)
    finally:
        shutil.rmtree(staging, ignore_errors=True)


def _publish(staging: Path, final: Path) -> None:
    """Rename, which succeeds only where `final` is absent or an empty directory."""
    try:
        staging.rename(final)
    except OSError as error:
        if final.exists():
            raise DataError(f"{final}: was written by someone else meanwhile; nothing was changed") from error
        raise
    fsync(final.parent)


def _remove_leavings(parent: Path, prefix: str) -> None:
    """Remove the staging directories of killed processes of this host."""
    for path in parent.iterdir():
        process = path.name.removeprefix(prefix)
        if path.name.startswith(prefix) and process.isdecimal() and not _is_alive(int(process)):
            shutil.rmtree(path, ignore_errors=True)


def _is_alive(process: int) -> bool:
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True
