"""Chooses the source of the kernel log: what a setting names, else the first one that this user may read."""

from __future__ import annotations

import os
import shutil
from collections.abc import Mapping
from pathlib import Path

from zslurm.aegis.agent.kernel_source.journal import Journal
from zslurm.aegis.agent.kernel_source.kmsg import Kmsg
from zslurm.aegis.agent.kernel_source.log_file import LogFile
from zslurm.aegis.agent.kernel_source.source import Position, Source, Unavailable


def open_source(
    setting: str, node: str, root: Path, environ: Mapping[str, str], timeout_s: float, at: Position | None = None
) -> Source:
    """Open the source that a setting names.

    Args:
        setting: `auto`, or a file (`%n`: the node).
        node: name of this node.
        root: where /dev is; see `sysfs.sysroot`.
        environ: to find journalctl in, and to run it with.
        timeout_s: after which journalctl counts as hanging.
        at: a position of before, of the same setting; None: the end.

    Raises:
        Unavailable: nothing can be read, with the reason for each way that was tried.
    """
    if setting != "auto":
        return LogFile(Path(setting.replace("%n", node)), at)
    try:
        return Kmsg(root / "dev/kmsg", at)
    except Unavailable as error:
        why = str(error)
    program = shutil.which("journalctl", path=environ.get("PATH", os.defpath)) if root == Path("/") else None
    if program is None:
        raise Unavailable(f"{why}; no journalctl")
    try:
        return Journal(program, environ, timeout_s, at)
    except Unavailable as error:
        raise Unavailable(f"{why}; {error}") from error
