"""Is the runs directory shared, writable and fast enough, from every node?

The login node leaves a file there; each node reads it, writes a small file and fsyncs it, then a larger one. All
nodes do so at the same time, as they do when they save a checkpoint.
"""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

from zslurm.checkpoint_tools.quantities import show_bytes
from zslurm.doctor.check import Check, NodeData, Outcome, failed, warned, worst
from zslurm.hardware.node_sources import Sources

TOKEN = "from-login"
_MIB = 1 << 20
_LARGE = 16 * _MIB


def check(sources: Sources) -> Outcome:
    """Read what the login node wrote, then write."""
    directory, probe = sources.task.directory, sources.task.probe
    if not probe:
        return failed(f"{directory}: the login node cannot write there", "name another directory with --directory")
    here = Path(probe)
    try:
        seen = (here / TOKEN).read_text()
    except OSError as error:
        return failed(
            f"{directory}: what the login node wrote is not visible: {error.strerror}",
            "name a directory that all nodes share with --directory",
        )
    if seen != sources.task.token:
        return failed(f"{directory}: another text is read than the login node wrote", "is the file system stale?")
    try:
        small = _write(here / f"{sources.node}.small", sources.task.token.encode())
        large = _write(here / f"{sources.node}.large", os.urandom(_MIB) * (_LARGE // _MIB))
    except OSError as error:
        return failed(f"{directory}: cannot be written: {error.strerror}", "look at the quota and at permissions")
    finally:
        with suppress(OSError):
            (here / f"{sources.node}.large").unlink()
    rate = _LARGE / large  # bytes/s
    shown = f"{show_bytes(rate)}/s"
    problems, limits = [], sources.limits
    remedy = "put runs on a faster file system; nodes that are slower than the others have a bad route"
    if small > limits.fsync_s:
        problems.append(warned(f"fsync of a small file took {small:.2g} s, over {limits.fsync_s:g}", remedy))
    if rate < limits.write_mib_s * _MIB:
        problems.append(warned(f"{shown} written, {limits.write_mib_s:g} MiB/s wanted", remedy))
    return worst(
        problems,
        f"fsync in {1000 * small:.0f} ms, {shown}",
        data={"file": f"{sources.node}.small"},
    )


def compare(nodes: Mapping[str, NodeData], sources: Sources) -> Mapping[str, Outcome]:
    """That what each node wrote is visible on the login node."""
    probe = Path(sources.task.probe)
    found = {}
    for name, node in nodes.items():
        written = node.data.get("file")
        if written and _read(probe / written) != sources.task.token:
            reason = f"{sources.task.directory}: what the node wrote is not visible here"
            found[name] = failed(reason, "the file system is not shared, or its caches are stale")
    return found


def _write(path: Path, content: bytes) -> float:
    """Write and fsync a file; returns the seconds it took."""
    began = time.monotonic()
    with path.open("wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
    return max(time.monotonic() - began, 1e-6)


def _read(path: Path) -> str | None:
    try:
        return path.read_text()
    except OSError:
        return None


CHECK = Check("shared-files", "storage", "the runs directory is shared, writable and fast", "node", check, compare)
