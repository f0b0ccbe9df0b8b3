"""Is the Python environment there on the nodes, and the same as here?"""

from __future__ import annotations

import sys
from importlib import metadata, util
from pathlib import Path

import zslurm
from zslurm.doctor.check import Check, Outcome, failed, passed
from zslurm.hardware.node_sources import Sources


def check(sources: Sources) -> Outcome:
    """Versions of Python, zslurm and torch, found without importing torch."""
    versions = {
        "Python": ".".join(map(str, sys.version_info[:3])),
        "zslurm": zslurm.__version__,
        "torch": _version("torch"),
    }
    if util.find_spec("torch") is None:
        return failed("torch is not installed", f"install it into {Path(sys.prefix)}", must_match=versions)
    return passed(", ".join(f"{name} {value}" for name, value in versions.items()), must_match=versions)


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


CHECK = Check("python", "system", "Python, zslurm and torch are the same on all nodes and here", "both", check)
