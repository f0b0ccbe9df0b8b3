"""How large the token bundles and the newest checkpoint are; looked at once, on the login node."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from contextlib import suppress
from pathlib import Path

from zslurm.checkpoint_tools.format.layout import MANIFEST
from zslurm.checkpoint_tools.listing import newest_committed
from zslurm.hardware.node_sources import Stored


def stored_sizes(runs: Path, paths: Iterable[Path]) -> Stored:
    """Return the bytes of bundles in `paths`, or one folder below, and of the newest checkpoint of all `runs`.

    What cannot be read counts as nothing: other checks report it.
    """
    bundles = {path.resolve() for directory in paths for path in _bundles(directory)}
    newest: tuple[float, Path] | None = None
    for run in _entries(runs):
        with suppress(OSError):
            if (checkpoint := newest_committed(run / "checkpoints")) is not None:
                saved = (checkpoint / MANIFEST).stat().st_mtime
                newest = max(newest or (saved, checkpoint), (saved, checkpoint))
    if newest is None:
        return Stored(_size(bundles))
    path = newest[1]
    return Stored(_size(bundles), _size(_entries(path)), f"{path.parent.parent.name}/{path.name}")


def _bundles(directory: Path) -> Iterator[Path]:
    from zslurm.train.data.schema import BUNDLE_NAME

    for entry in _entries(directory):
        for path in [entry, *(_entries(entry) if entry.is_dir() else ())]:
            if BUNDLE_NAME.fullmatch(path.name):
                yield path


def _entries(directory: Path) -> list[Path]:
    try:
        return [Path(entry.path) for entry in os.scandir(directory)]
    except OSError:
        return []


def _size(paths: Iterable[Path]) -> int:
    total = 0
    for path in paths:
        with suppress(OSError):
            total += path.stat().st_size
    return total
