"""How a checkpoint becomes visible: begin, (every rank writes its shard), commit.

One rank calls these, and one save is in progress at a time; the caller sees to both (a run has one writer).
A nonce that no other attempt uses keeps a writer that was given up, but is still alive, out of the new
save: its directory is swept by the next `begin`, so all that it can do is fail.

    step                                   what holds after a kill, or a loss of power, right after it
    begin   sweep leftovers                earlier checkpoints, all whole
            make .step-N.<nonce>.tmp       the same; names with a dot are never listed
    ranks   write and sync shards          the same
    commit  write, sync manifest.json.tmp  the same
            rename to manifest.json        the same: the directory still has its temporary name
            sync the directory             the same; shards and manifest now survive a loss of power
            [rename step-N to              only if step-N exists already; while step-N is absent, the
             step-N.superseded]            superseded one is listed for it, and `begin` renames it back
            rename .tmp to step-N          the new checkpoint is listed, and it is whole
            sync the parent                the new checkpoint survives a loss of power: it is committed
            [delete step-N.superseded]     half-deleted is harmless: it is not listed while step-N exists

Why a step that exists already is replaced, not kept: a run comes to a step a second time only because it went
back to before it, and the usual reason is that loading found the old one damaged, which no listing can see.

Cost: one rename or two, three fsyncs, the manifest's bytes; independent of the checkpoint's size and of the
number of ranks. The caller reports "saved" when `commit` returns, not before.
"""

from __future__ import annotations

import os
from pathlib import Path

from zslurm.checkpoint_tools.durable import At, no_fault_hook, remove, sync, write_all, writing
from zslurm.checkpoint_tools.errors import Mismatch
from zslurm.checkpoint_tools.format import layout, manifest_json
from zslurm.checkpoint_tools.format.manifest import Manifest
from zslurm.checkpoint_tools.plain import StrPath

BEGIN_POINTS = ("begin: swept", "begin: created")
"""Where `begin` calls `at`, in order."""

COMMIT_POINTS = (
    "commit: manifest written",
    "commit: manifest synced",
    "commit: manifest named",
    "commit: directory synced",
    "commit: old one aside",  # only if the step was saved before
    "commit: visible",
    "commit: parent synced",
    "commit: done",
)
"""Where `commit` calls `at`, in order."""


def begin(root: StrPath, step: int, nonce: str, *, at: At = no_fault_hook) -> Path:
    """Make the directory that all ranks write their shards of `step` into, and return its path.

    `root` is made if need be, but no directory above it: one that was moved away while a run trains must not come
    back in part. What dead saves left in `root` is removed. `nonce` (letters, digits, "_", "-")
    must be new for every attempt to save.

    Raises:
        NoSpace, WriteFailed: the file system refused.
        Mismatch: `nonce` cannot be part of a file name, or was used before.
    """
    root = Path(root)
    directory = root / layout.temporary_name(step, nonce)
    with writing(root):
        if not root.is_dir():
            root.mkdir()
            sync(root.parent)
        if directory.exists():
            raise Mismatch(f"nonce {nonce!r} was used before for step {step}; every save needs a new one")
        _sweep(root)
        at("begin: swept")
        directory.mkdir()
        at("begin: created")
    return directory


def commit(root: StrPath, directory: StrPath, manifest: Manifest, *, at: At = no_fault_hook) -> Path:
    """Make the save in `directory` the checkpoint of its step, in one rename; returns the checkpoint's path.

    Call it when every rank's shard is written and reported: nothing here looks at the shards again.

    Raises:
        NoSpace, WriteFailed: the file system refused. If only the last sync failed, the checkpoint is
            visible, but may not survive a loss of power.
        Mismatch: `directory` is not what `begin` made in `root` for the manifest's step.
    """
    root = Path(root)
    directory = Path(directory)
    if directory.parent != root or layout.step_of_temporary(directory.name) != manifest.step:
        raise Mismatch(f"{directory} was not begun in {root} for step {manifest.step}; commit what begin returned")
    final = root / layout.step_name(manifest.step)
    superseded = root / layout.superseded_name(manifest.step)
    data = manifest_json.encode(manifest)
    with writing(directory):
        write_manifest(directory, data, at)
        sync(directory)
        at("commit: directory synced")
        replaces = os.path.lexists(final)
        if replaces:
            final.rename(superseded)
            at("commit: old one aside")
        directory.rename(final)
        at("commit: visible")
        sync(root)
        at("commit: parent synced")
        if replaces:
            remove(superseded)
    at("commit: done")
    return final


def discard(directory: StrPath) -> None:
    """Give up the save in `directory` and free its space. Never raises for what is gone already."""
    directory = Path(directory)
    remove(directory)


def write_manifest(directory: Path, data: bytes, at: At = no_fault_hook) -> None:
    """Write, sync and name the manifest of the save in `directory`; raises OSError."""
    temporary = directory / layout.MANIFEST_TEMPORARY
    descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o666)
    try:
        write_all(descriptor, [memoryview(data)])
        at("commit: manifest written")
        os.fsync(descriptor)
        at("commit: manifest synced")
    finally:
        os.close(descriptor)
    temporary.rename(directory / layout.MANIFEST)
    at("commit: manifest named")


def _sweep(root: Path) -> None:
    """Remove what dead saves and unfinished deletions left, and finish or undo an interrupted replacement."""
    for path in filter(lambda path: layout.is_superseded(path.name), sorted(root.iterdir())):
        final = path.with_name(path.name.removesuffix(layout.SUPERSEDED_SUFFIX))
        if os.path.lexists(final):
            remove(path)
        else:
            path.rename(final)
    for path in sorted(root.iterdir()):
        if layout.is_leftover(path.name):
            remove(path)
