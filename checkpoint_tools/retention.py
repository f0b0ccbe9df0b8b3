"""Which checkpoints are kept: the newest k that are complete.

A checkpoint is renamed to a name that never counts before its first file is deleted, oldest first, so a
kill at any point leaves only whole checkpoints and hidden leftovers, which the next `begin` sweeps.
Directories that are not complete are left alone: they do not count towards k, and what made them so is for
a person to see.

Cost: one listing, then one rename and the deletion for each. It cannot see damage inside shards: keep at
least two, so that the one before is there when the newest turns out damaged.
"""

from __future__ import annotations

import secrets
from pathlib import Path

from checkpoint_tools import layout
from checkpoint_tools.durable import At, nowhere, remove, sync_directory, writing
from checkpoint_tools.errors import Mismatch
from checkpoint_tools.listing import list_checkpoints

POINTS = ("prune: hidden", "prune: deleted")
"""Where `prune` calls `at` for each checkpoint that it removes, in order."""


def prune(root: Path, keep_last: int, *, at: At = nowhere) -> list[Path]:
    """Remove all complete checkpoints but the newest `keep_last`; returns what was removed, oldest first.

    Call it from the run's one writer, when no save is in progress.

    Raises:
        Mismatch: keep_last is below 1; the last checkpoint is never removed.
        WriteFailed: the file system refused a rename.
        ReadFailed: see `list_checkpoints`.
    """
    if keep_last < 1:
        raise Mismatch(f"keep_last must be at least 1, got {keep_last}")
    complete = [listing for listing in list_checkpoints(root) if listing.complete]
    removed = []
    for listing in reversed(complete[keep_last:]):
        hidden = root / layout.deleted_name(listing.step, secrets.token_hex(4))
        with writing(listing.path):
            listing.path.rename(hidden)
            sync_directory(root)
        at("prune: hidden")
        remove(hidden)
        at("prune: deleted")
        removed.append(listing.path)
    return removed
