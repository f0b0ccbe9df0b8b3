"""Find the kernels that were built before this process started, and warn of those that it builds. No torch here.

A job's preparation (zslurm/job/preparation/kernel_builds.py) leaves a directory on each node:

    $ZSLURM_PREPARED_KERNELS/triton/    a cache of Triton
    $ZSLURM_PREPARED_KERNELS/hip/       code objects of HIP sources, under the names of hip/build.py

What is not there is built as without it, and kept there for the other processes of the node.
"""

from __future__ import annotations

import logging
import os
import stat
from collections.abc import MutableMapping
from pathlib import Path

PREPARED_VARIABLE = "ZSLURM_PREPARED_KERNELS"
_TRITON_VARIABLE = "TRITON_CACHE_DIR"

_log = logging.getLogger(__name__)


def hip_directory() -> Path | None:
    """Return the directory of prepared code objects; None without one."""
    directory = _trusted(os.environ.get(PREPARED_VARIABLE, ""))
    return None if directory is None else directory / "hip"


def use_prepared(environ: MutableMapping[str, str]) -> None:
    """Let Triton read what was prepared on this node, unless its cache directory is configured."""
    directory = _trusted(environ.get(PREPARED_VARIABLE, ""))
    if directory is not None and any((directory / "triton").glob("*")):
        environ.setdefault(_TRITON_VARIABLE, str(directory / "triton"))


def _trusted(name: str) -> Path | None:
    return Path(name) if name and is_own(Path(name)) else None


def is_own(directory: Path) -> bool:
    """Return whether a directory belongs to this user and no other user may write to it."""
    try:
        status = directory.lstat()
    except OSError:
        return False
    return stat.S_ISDIR(status.st_mode) and status.st_uid == os.getuid() and not status.st_mode & 0o022


_warns = False


def warn_of_builds() -> None:
    """Warn, once, if this process builds a kernel from now on: for ranks, whose kernels were built before."""
    global _warns
    _warns = True


def note_build(kernel: str) -> None:
    """Note that this process builds a kernel: with a warning, the first time after `warn_of_builds`."""
    global _warns
    if _warns:
        prepared = os.environ.get(PREPARED_VARIABLE)
        where = f"{prepared} does not have it" if prepared else "none were built before it started"
        _log.warning(f"this rank compiles kernels, which delays its first steps: {kernel} first; {where}")
    _warns = False
