"""Name the user's directories of what is built and measured on their machines. No torch at import.

$ZSLURM_KERNEL_CACHE, or $XDG_CACHE_HOME/zslurm/kernels, or ~/.cache/zslurm/kernels
    muon-gfx942-3f09c1e2b7a85d64.code       builds: hip/build.py

$ZSLURM_KERNEL_TABLES names the file of what `zslurm bench kernels` measured on a cluster: dispatch.py reads it.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

CACHE_VARIABLE = "ZSLURM_KERNEL_CACHE"
TABLES_VARIABLE = "ZSLURM_KERNEL_TABLES"


def cache_directory() -> Path:
    """Return the directory that builds are kept in, by the environment."""
    base = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    configured = os.environ.get(CACHE_VARIABLE) or f"{base}/zslurm/kernels"
    directory = os.path.expanduser(configured)  # noqa: PTH111  # Path's raises for users without an entry, as in containers
    # A user without a home has what cannot be a directory, and gets the warning of one that is not writable.
    return Path(directory) if not directory.startswith("~") else Path(os.devnull, "zslurm-kernels")


def measured_tables() -> Path | None:
    """Return the file of what was measured of the kernels on this cluster's GPUs; None if none is named."""
    name = os.environ.get(TABLES_VARIABLE)
    return Path(name) if name else None


def with_tables(file: Path, tables: dict[str, Any]) -> dict[str, Any]:
    """Return the content of a file of measured tables with newer ones; what they do not have stays.

    Raises:
        OSError: the file is there and cannot be read.
        ValueError: it is no JSON.
    """
    merged: dict[str, Any] = _merged(json.loads(file.read_text()) if file.exists() else {}, tables)
    return merged


def _merged(old: Any, new: Any) -> Any:
    if not (isinstance(old, dict) and isinstance(new, dict)):
        return new
    return old | {key: _merged(old.get(key), value) for key, value in new.items()}
