"""A directory of bundles, each up to a size, that can be gone on with after a crash.

How many bundles there are is known at the end only, when they get their names; until then they are called
part-NNNNN.h5. A document is never split over two bundles.
"""

from __future__ import annotations

from pathlib import Path
from types import TracebackType

import numpy as np
from numpy.typing import NDArray

from zslurm.checkpoint_tools.durable import sync
from zslurm.train.data.build.writer import BundleWriter
from zslurm.train.data.schema import BUNDLE_NAME, BundleHeader, bundle_name

BUNDLE_BYTES = 2 << 30
OFFSET_BYTES = 8  # of a document in /documents


class RollingWriter:
    """Writes bundles of at most `bundle_bytes` each; a larger document has one to itself.

    As a context manager it discards the unfinished bundle on an exception; finished ones stay.
    """

    def __init__(
        self,
        directory: Path,
        header: BundleHeader,
        bundle_bytes: int = BUNDLE_BYTES,
        *,
        masked: bool = False,
        finished: int = 0,
    ) -> None:
        """`finished`: bundles that are in `directory` already."""
        self.finished = finished
        self._directory, self._header, self._limit, self._masked = directory, header, bundle_bytes, masked
        self._token_bytes = header.token_dtype.itemsize + int(masked)
        self._writer: BundleWriter | None = None

    def has_room_for(self, tokens: int) -> bool:
        """Return whether the bundle that is being written has room for a document of so many tokens.

        Where it has not, it is to be finished (`finish`) before the document is appended.
        """
        if self._writer is None:
            return True
        size = (self._writer.tokens + tokens) * self._token_bytes + (self._writer.documents + 1) * OFFSET_BYTES
        return size <= self._limit

    def append(self, document: NDArray[np.integer], targets: NDArray[np.integer] | None = None) -> None:
        """Add one document to the bundle that is being written, as BundleWriter.append."""
        if self._writer is None:
            self._writer = BundleWriter(
                part_path(self._directory, self.finished), self._header, masked=self._masked
            )
        self._writer.append(document, targets)

    def finish(self) -> tuple[int, int]:
        """Write the bundle out, durably; the next document begins another. Its tokens and documents."""
        if self._writer is None:
            return 0, 0
        writer, self._writer = self._writer, None
        try:
            writer.commit()
        finally:
            writer.discard()
        self.finished += 1
        return writer.tokens, writer.documents

    def commit(self) -> int:
        """Finish the last bundle and give all of them their names; how many there are."""
        self.finish()
        for part in range(self.finished):
            part_path(self._directory, part).replace(self._directory / bundle_name(part, self.finished))
        sync(self._directory)
        return self.finished

    def __enter__(self) -> RollingWriter:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._writer is not None:
            self._writer.discard()


def part_path(directory: Path, part: int) -> Path:
    """Return where bundle `part` (from 0) lies before all are finished."""
    return directory / f"part-{part:05d}.h5"


def take_names_back(directory: Path) -> None:
    """Undo the naming of a `commit` that was interrupted."""
    for path in sorted(directory.iterdir()):
        if match := BUNDLE_NAME.fullmatch(path.name):
            path.replace(part_path(directory, int(match["part"])))
