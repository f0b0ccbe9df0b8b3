"""Which checkpoints a run has, and which of them are kept.

Listing a checkpoint parses its manifest and stats each of its files; no shard is opened, so damage inside a shard
is not seen here (reading sees it, block by block).

Kept are the newest k that are complete, every n-th step, and those that the caller names. A checkpoint is renamed
to a name that never counts before its first file is deleted, oldest first, so a kill at any point leaves only
whole checkpoints and hidden leftovers, which the next `begin` sweeps. Directories that are not complete are left
alone: they do not count towards k, and why they are not is for a person to see. Keep at least two, so that the one
before is there when the newest turns out damaged.
"""

from __future__ import annotations

import secrets
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path

from zslurm.checkpoint_tools.durable import At, no_fault_hook, remove, sync, writing
from zslurm.checkpoint_tools.errors import CheckpointError, Mismatch, read_failed
from zslurm.checkpoint_tools.format import layout
from zslurm.checkpoint_tools.plain import StrPath
from zslurm.checkpoint_tools.read import Checkpoint

PRUNE_POINTS = ("prune: hidden", "prune: deleted")
"""Where `prune` calls `at` for each checkpoint that it removes, in order."""


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


def list_checkpoints(root: StrPath) -> list[Listing]:
    """Return all checkpoints in `root`, newest step first, one per step; empty if there is no such directory.

    Other names, saves in progress and dead saves are passed over. Whatever a checkpoint's directory holds,
    the worst it can get is a reason.

    Raises:
        ReadFailed: `root` exists but cannot be listed. (No list is not an empty list: a run that took it
            for one would start from scratch.)
    """
    root = Path(root)
    try:
        names = {path.name for path in root.iterdir()}
    except FileNotFoundError:
        return []
    except OSError as cause:
        raise read_failed(root, cause) from cause
    listings = []
    for name in names:
        step = layout.step_of(name)
        if step is None or (layout.is_superseded(name) and layout.step_name(step) in names):
            continue
        listings.append(_look(root / name, step))
    return sorted(listings, key=lambda listing: -listing.step)


def newest_committed(root: Path) -> Path | None:
    """Return the directory of the newest committed checkpoint in `root`; None if there is none.

    Nothing but the names is looked at: for frequent readers; `list_checkpoints` would stat each shard
    of each checkpoint. Whether it is complete is not known.

    Raises:
        OSError: `root` exists but cannot be listed.
    """
    try:
        names = [path.name for path in root.iterdir()]
    except FileNotFoundError:
        return None
    steps = {name: step for name in names if (step := layout.step_of(name)) is not None}
    newest = max(steps, key=lambda name: (steps[name], not layout.is_superseded(name)), default=None)
    return None if newest is None else root / newest


def _look(path: Path, step: int) -> Listing:
    try:
        with Checkpoint.open(path) as checkpoint:
            manifest = checkpoint.manifest
    except CheckpointError as cause:
        return Listing(path, step, str(cause))
    if manifest.step != step:
        return Listing(path, step, f"its manifest is that of step {manifest.step}: the directory was renamed")
    return Listing(path, step, None, manifest.tokens, manifest.world_size)


def prunable(root: StrPath, keep_last: int, *, keep_every: int = 0, keep: Collection[int] = ()) -> list[Listing]:
    """Return the complete checkpoints that nothing keeps, oldest first.

    Args:
        root: the run's checkpoints.
        keep_last: how many of the newest stay, so there is always one left.
        keep_every: those whose step is a multiple of it stay forever; 0: none do.
        keep: steps that stay, such as the best one by validation loss; a step without a checkpoint is no error.

    Raises:
        Mismatch: keep_last is below 1, or keep_every below 0; the last checkpoint is never removed.
        ReadFailed: see `list_checkpoints`.
    """
    if keep_last < 1:
        raise Mismatch(f"keep_last must be at least 1, got {keep_last}")
    if keep_every < 0:
        raise Mismatch(f"keep_every must be at least 0, got {keep_every}")
    complete = [listing for listing in list_checkpoints(root) if listing.complete]
    return [
        listing
        for listing in reversed(complete[keep_last:])
        if listing.step not in keep and not (keep_every and listing.step % keep_every == 0)
    ]


def prune(
    root: StrPath, keep_last: int, *, keep_every: int = 0, keep: Collection[int] = (), at: At = no_fault_hook
) -> list[Path]:
    """Remove what `prunable` names; returns what was removed, oldest first.

    Call it from the run's one writer, when no save is in progress.

    Raises:
        Mismatch, ReadFailed: see `prunable`.
        WriteFailed: the file system refused a rename.
    """
    root = Path(root)
    removed = []
    for listing in prunable(root, keep_last, keep_every=keep_every, keep=keep):
        hidden = root / layout.deleted_name(listing.step, secrets.token_hex(4))
        with writing(listing.path):
            listing.path.rename(hidden)
            sync(root)
        at("prune: hidden")
        remove(hidden)
        at("prune: deleted")
        removed.append(listing.path)
    return removed
