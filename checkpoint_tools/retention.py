"""Which checkpoints are kept: the newest k that are complete, every n-th step, and those that the caller names.

A checkpoint is renamed to a name that never counts before its first file is deleted, oldest first, so a
kill at any point leaves only whole checkpoints and hidden leftovers, which the next `begin` sweeps.
Directories that are not complete are left alone: they do not count towards k, and what made them so is for
a person to see.

Cost: one listing, then one rename and the deletion for each. It cannot see damage inside shards: keep at
least two, so that the one before is there when the newest turns out damaged.
"""

from __future__ import annotations

import secrets
from collections.abc import Collection
from pathlib import Path

from zslurm.checkpoint_tools import layout
from zslurm.checkpoint_tools.durable import At, no_fault_hook, remove, sync, writing
from zslurm.checkpoint_tools.errors import Mismatch
from zslurm.checkpoint_tools.listing import Listing, list_checkpoints

POINTS = ("prune: hidden", "prune: deleted")
"""Where `prune` calls `at` for each checkpoint that it removes, in order."""


def prunable(root: Path, keep_last: int, *, keep_every: int = 0, keep: Collection[int] = ()) -> list[Listing]:
    """Return the complete checkpoints that nothing keeps, oldest first.

    Args:
        root: the run's checkpoints.
        keep_last: the newest so many stay, so there is always one left.
        keep_every: those whose step is a multiple of it stay for ever; 0: none do.
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
    root: Path, keep_last: int, *, keep_every: int = 0, keep: Collection[int] = (), at: At = no_fault_hook
) -> list[Path]:
    """Remove what `prunable` names; returns what was removed, oldest first.

    Call it from the run's one writer, when no save is in progress.

    Raises:
        Mismatch, ReadFailed: see `prunable`.
        WriteFailed: the file system refused a rename.
    """
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
