"""Errors of the checkpoint format, each one something a caller can act on.

Every message is one line: what happened, where, and what to do. All derive from `CheckpointError`, which is
a `zslurm.Error`, and all survive pickling, so that a background writer's error reaches its trainer whole.
"""

from __future__ import annotations

import errno
import os
from contextlib import suppress
from pathlib import Path

from zslurm.checkpoint_tools.quantities import show_bytes
from zslurm.error import Error

_OUT_OF_SPACE = {errno.ENOSPC, errno.EDQUOT}


class CheckpointError(Error):
    """Root of every error this package raises."""


class NotACheckpoint(CheckpointError):
    """The path holds no committed checkpoint. Act: look for another one, or correct the path."""


class VersionTooNew(CheckpointError):
    """The checkpoint was written by a newer zslurm than this one. Act: upgrade; the checkpoint is fine."""


class Damaged(CheckpointError):
    """Bytes are missing or not what was written. Act: use an older checkpoint.

    `file` is the path of the damaged file, `tensor` the tensor that was being read and `block` the
    number of the block whose checksum failed; the last two are None if the damage is not that local.
    """

    def __init__(self, file: Path, reason: str, tensor: str | None = None, block: int | None = None) -> None:
        super().__init__(file, reason, tensor, block)
        self.file, self.reason, self.tensor, self.block = file, reason, tensor, block

    def __str__(self) -> str:
        reader = f" (reading tensor {self.tensor!r})" if self.tensor is not None else ""
        return f"{self.file} is damaged: {self.reason}{reader}; use an older checkpoint"


class Incomplete(CheckpointError):
    """Some elements of a tensor are in no shard, or in two. Act: the writer has a bug; do not commit."""


class Mismatch(CheckpointError):
    """What was handed in does not fit: an array, a range, a name, a setting. Act: correct the call."""


class InUse(CheckpointError):
    """Another run writes into this directory. Act: wait for it, or, if it is dead, remove its lock."""


class ReadFailed(CheckpointError):
    """The operating system refused a read (permission, file limit, I/O error). Act: repair it and try again."""


class WriteFailed(CheckpointError):
    """A save did not reach the disk; earlier checkpoints are untouched. Act: repair the cause, save again."""


class NoSpace(WriteFailed):
    """The file system or the quota is full. Act: free space, or keep fewer checkpoints."""


def write_failed(path: Path, cause: OSError) -> WriteFailed:
    """Return the `WriteFailed` (or `NoSpace`) for what `cause` means for a save at `path`."""
    what = f"cannot write {path}: {cause.strerror or cause}"
    if cause.errno in _OUT_OF_SPACE:
        free = _free(path) if cause.errno == errno.ENOSPC else ""  # a quota can be full where the disk is not
        return NoSpace(f"{what}{free}; earlier checkpoints are untouched: free space or keep fewer of them")
    advice = "raise `ulimit -f`" if cause.errno == errno.EFBIG else "correct the cause"
    return WriteFailed(f"{what}; earlier checkpoints are untouched: {advice} and save again")


def _free(path: Path) -> str:
    """Return the free space of a path's file system as words for a message; empty if it cannot be read."""
    with suppress(OSError):
        space = os.statvfs(path.parent)
        return f" ({show_bytes(space.f_bavail * space.f_frsize)} free)"
    return ""


def read_failed(path: Path, cause: OSError) -> ReadFailed:
    """Return the `ReadFailed` for what `cause` means for a read of `path`."""
    return ReadFailed(f"cannot read {path}: {cause.strerror or cause}; correct the cause and try again")
