"""Whether a directory can be measured: it is there, can be written, and has room."""

from __future__ import annotations

import os
from pathlib import Path

from zslurm.checkpoint_tools.quantities import show_bytes
from zslurm.hardware.mounts import mount_of

SHARE_OF_FREE = 0.5
"""Of the free space, what a benchmark takes at most: others write there too."""


def refusal(path: Path, *, size: int, checkpoint: int, ranks_per_node: int, nodes: int) -> str | None:
    """Return why a directory cannot be measured, in one line; None if it can.

    Args:
        path: the directory.
        size: bytes that each rank reads and writes.
        checkpoint: bytes of each rank's shard.
        ranks_per_node: ranks on each node.
        nodes: that write there at once, if it is shared.
    """
    if not path.is_dir():
        return f"{path}: {'not a directory' if path.exists() else 'no such directory'}; name one that exists"
    mount = mount_of(str(path.resolve()), Path("/"))
    shared = mount is None or mount.is_networked
    needed = (size + checkpoint) * ranks_per_node * (nodes if shared else 1)
    try:
        space = os.statvfs(path)
    except OSError as error:
        return f"{path}: {error.strerror}"
    if space.f_flag & os.ST_RDONLY:
        return f"{path}: the file system is read-only; name a directory that you can write"
    if not os.access(path, os.W_OK | os.X_OK):
        return f"{path}: you cannot write there; name a directory of yours"
    free = space.f_bavail * space.f_frsize
    if needed > SHARE_OF_FREE * free:
        return (
            f"{path}: the benchmark takes {show_bytes(needed)} and at most half of the free space, which is "
            f"{show_bytes(free)}; give smaller --size and --checkpoint-size"
        )
    return None
