"""Reading and writing small files: whole, or not at all."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from zslurm.checkpoint_tools.plain import load_json

_LONGEST = 1 << 20  # a file of sysfs has one page; /proc/modules and the like a few


def read_text(path: Path) -> str | None:
    """Return a small file without the space around its text; None if it cannot be read.

    Reading sysfs may fail in any way: a GID that is not set answers EINVAL, a driver that hangs EIO.
    """
    try:
        with path.open("rb") as file:
            return file.read(_LONGEST).decode("utf-8", errors="replace").strip()
    except OSError:
        return None


def write_atomically(path: Path, text: str, *, private: bool = False) -> None:
    """Replace a file by rename: readers see the old or the new text, never a part; a failure leaves the old one.

    With `private` only its owner can read it, from its first byte.

    Raises:
        OSError: the disk is full or the file system is gone.
    """
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        if private:
            temporary.unlink(missing_ok=True)  # of a killed process that had this pid
            os.close(os.open(temporary, os.O_CREAT | os.O_EXCL, 0o600))
        temporary.write_text(text, encoding="utf-8")
        temporary.replace(path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


def read_json(path: Path) -> dict[str, Any] | None:
    """Return a JSON object from a file; None if it is missing or not an object."""
    try:
        value = load_json(path.read_bytes())
    except (OSError, ValueError):
        return None
    return value if isinstance(value, dict) else None
