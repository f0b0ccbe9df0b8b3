"""Which checkpoints a run has, newest first: the whole ones, and why the others are not.

Cost: per checkpoint, its manifest is parsed and each of its files is stat'ed; no shard is opened, so damage
inside a shard is not seen here (reading sees it, block by block).
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from zslurm.checkpoint_tools import layout
from zslurm.checkpoint_tools.errors import CheckpointError, read_failed
from zslurm.checkpoint_tools.read import Checkpoint


@dataclass(frozen=True, slots=True)
class Listing:
    """A directory that bears a checkpoint's name.

    Attributes:
        path: the directory.
        step: the step in its name.
        reason: why it cannot be used, in one line; None if it is complete.
        tokens, world_size: from its manifest; None if it is not complete.
    """

    path: Path
    step: int
    reason: str | None
    tokens: int | None = None
    world_size: int | None = None

    @property
    def complete(self) -> bool:
        """Return whether the manifest is intact and every file that it names is there in its full size."""
        return self.reason is None


def list_checkpoints(root: Path) -> list[Listing]:
    """Return all checkpoints in `root`, newest step first, one per step; empty if there is no such directory.

    Other names, saves in progress and dead saves are passed over. Whatever a checkpoint's directory holds,
    the worst it can get is a reason.

    Raises:
        ReadFailed: `root` exists but cannot be listed. (No list is not an empty list: a run that took it
            for one would start from scratch.)
    """
    try:
        names = {path.name for path in root.iterdir()}
    except FileNotFoundError:
        return []
    except OSError as cause:
        raise read_failed(root, cause) from cause
    found = []
    for name in names:
        step = layout.step_of(name)
        if step is None or (layout.is_superseded(name) and layout.step_name(step) in names):
            continue
        found.append(_look(root / name, step))
    return sorted(found, key=lambda listing: -listing.step)


def _look(path: Path, step: int) -> Listing:
    try:
        with Checkpoint.open(path) as checkpoint:
            manifest = checkpoint.manifest
    except CheckpointError as cause:
        return Listing(path, step, str(cause))
    if manifest.step != step:
        return Listing(path, step, f"its manifest is that of step {manifest.step}: the directory was renamed")
    return Listing(path, step, None, manifest.tokens, manifest.world_size)
