"""Reading sysfs and procfs below a movable root. What cannot be read is None, never a guess.

On a real node the root is `/`. Tests, and the nodes of a test cluster that share one kernel, have separate
trees: ZSLURM_SYSROOT names one, and `%n` in it is the node's name.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from pathlib import Path

from zslurm.core.files import read_text
from zslurm.slurm.environment import node_name

PCI_ADDRESS = re.compile(r"[0-9a-f]{4,8}:[0-9a-f]{2}:[0-9a-f]{2}\.[0-7]")


def sysroot(environ: Mapping[str, str] = os.environ) -> Path:
    """Return the directory of /sys, /proc and /opt of this node: `/`, unless ZSLURM_SYSROOT names another."""
    return Path((environ.get("ZSLURM_SYSROOT") or "/").replace("%n", node_name(environ)))


def read_int(path: Path) -> int | None:
    """Return a number in decimal, or in hexadecimal with 0x; None if there is none."""
    try:
        return int(read_text(path) or "", 0)
    except ValueError:
        return None


def names(directory: Path) -> list[str]:
    """Return what a directory holds, sorted; nothing if it cannot be read."""
    try:
        return sorted(entry.name for entry in directory.iterdir())
    except OSError:
        return []


def key_values(path: Path) -> dict[str, str]:
    """Return a file of lines `name value` or `name: value`; empty if it cannot be read."""
    pairs = (line.partition(":" if ":" in line else " ") for line in (read_text(path) or "").splitlines())
    return {name.strip(): value.strip() for name, separator, value in pairs if separator}


def target_name(link: Path) -> str | None:
    """Name of what a symbolic link points to, such as a device's driver; None if there is no link."""
    try:
        return link.readlink().name
    except OSError:
        return None


def pci_path(root: Path, entry: Path) -> tuple[str, ...]:
    """Return the way to a device from its root complex, itself last: `pci0000:00`, bridges, ..., `0000:c1:00.0`.

    Two devices are as close as the common start of their paths is long: the same switch, the same root port, the
    same root complex, nothing. `entry` is anything below the device in sysfs, by any link; the path is empty if
    the device is not on PCI (a software device) or does not exist.
    """
    real = Path(os.path.realpath(entry))
    try:
        parts = real.relative_to(os.path.realpath(root / "sys" / "devices")).parts
    except ValueError:
        return ()
    addresses = [index for index, directory_name in enumerate(parts) if PCI_ADDRESS.fullmatch(directory_name)]
    return parts[: addresses[-1] + 1] if addresses else ()
