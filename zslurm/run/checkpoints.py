"""From what a user types to a checkpoint: a run (its newest one), a directory, or a published model's folder."""

from __future__ import annotations

from pathlib import Path

from zslurm.checkpoint_tools import CheckpointError, Listing, list_checkpoints
from zslurm.checkpoint_tools.format.layout import MANIFEST
from zslurm.core.errors import NotFound, ZslurmError
from zslurm.core.paths import expand
from zslurm.run.index import find_run

_PUBLISHED = ("model.safetensors", "model.safetensors.index.json")


def is_published(path: Path) -> bool:
    """Return whether `path` is the folder of a published model: safetensors files of the usual names."""
    return any((path / name).exists() for name in _PUBLISHED)


def find_checkpoints(reference: str) -> tuple[Path, list[Listing]]:
    """Return the directory of checkpoints that a run or path means, and what is in it, newest first.

    Raises:
        NotFound: there is no such run or directory.
        ZslurmError: it cannot be read.
    """
    path = expand(reference)
    root = path if path.is_dir() and not (path / "config.json").is_file() else find_run(reference).checkpoints
    try:
        return root, list_checkpoints(root)
    except CheckpointError as error:
        raise ZslurmError(str(error)) from error


def find_checkpoint(reference: str) -> Path:
    """Return the checkpoint that `reference` means: a directory, a directory of several, or a run; the newest.

    Raises:
        NotFound: there is none; if there are incomplete ones, why they are.
        ZslurmError: the directory cannot be read.
    """
    path = expand(reference)
    if (path / MANIFEST).exists():
        return path
    root, listings = find_checkpoints(reference)
    for listing in listings:
        if listing.complete:
            return listing.path
    reasons = "".join(f"\n{listing.path.name}: {listing.reason}" for listing in listings)
    raise NotFound(f"{reference}: no complete checkpoint in {root}{reasons}")


def find_newest(reference: str) -> Path:
    """As `find_checkpoint`, but of many the newest whatever state it is in.

    Raises:
        NotFound, ZslurmError: as `find_checkpoint`.
    """
    path = expand(reference)
    if (path / MANIFEST).exists():
        return path
    root, listings = find_checkpoints(reference)
    if not listings:
        raise NotFound(f"{reference}: no checkpoint in {root}")
    return listings[0].path


def find_weights(reference: str) -> Path:
    """Return a checkpoint, as `find_checkpoint`, or the folder of a published model.

    Raises:
        NotFound, ZslurmError: as `find_checkpoint`.
    """
    path = expand(reference)
    return path if is_published(path) else find_checkpoint(reference)
