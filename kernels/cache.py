"""Name the user's directories of what is built and measured on their machines. No torch at import.

$ZSLURM_KERNEL_CACHE, or $XDG_CACHE_HOME/zslurm/kernels, or ~/.cache/zslurm/kernels
    muon-gfx942-3f09c1e2b7a85d64.code       builds: hip/build.py
    tables/gfx942/symmetric_product.json    what `zslurm bench kernels` measured: dispatch.py reads it
"""

from __future__ import annotations

import json
import os
import secrets
from pathlib import Path
from typing import Any

CACHE_VARIABLE = "ZSLURM_KERNEL_CACHE"


def cache_directory() -> Path:
    """Return the directory that builds are kept in, by the environment."""
    base = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    configured = os.environ.get(CACHE_VARIABLE) or f"{base}/zslurm/kernels"
    directory = os.path.expanduser(configured)  # noqa: PTH111  # Path's raises for users without an entry, as in containers
    # A user without a home has what cannot be a directory, and gets the warning of one that is not writable.
    return Path(directory) if not directory.startswith("~") else Path(os.devnull, "zslurm-kernels")


def table_file(arch: str, folder: str) -> Path:
    """Return the file of what was measured of an operation's folder on this user's GPUs of an architecture."""
    return cache_directory() / "tables" / arch / f"{folder}.json"


def write_table(arch: str, folder: str, table: dict[str, Any]) -> Path:
    """Write what was measured, so that the file is whole whenever it is there.

    Raises:
        OSError: the directory cannot be written.
    """
    file = table_file(arch, folder)
    file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    partial = file.with_name(f".{file.name}.{os.getpid()}-{secrets.token_hex(4)}")
    try:
        partial.write_text(json.dumps(table, indent=2) + "\n")
        partial.replace(file)
    except OSError:
        partial.unlink(missing_ok=True)
        raise
    return file
