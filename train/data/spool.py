"""A file that grows by arrays and is read back once: for datasets whose length is known at the end only."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any, BinaryIO

from numpy.typing import NDArray


class Spool:
    """A raw file that grows by arrays and is read back once, in blocks."""

    def __init__(self, path: Path) -> None:
        """Make the file, or empty it."""
        self._path = path
        self._file: BinaryIO = path.open("w+b")

    def append(self, elements: NDArray[Any]) -> None:
        """Add the bytes of an array."""
        self._file.write(elements.tobytes())

    def read(self, block_bytes: int) -> Iterator[bytes]:
        """Yield what was added, in blocks."""
        self._file.seek(0)  # flushes
        while block := self._file.read(block_bytes):
            yield block

    def discard(self) -> None:
        """Remove the file."""
        with suppress(OSError):  # what was not flushed is not wanted
            self._file.close()
        self._path.unlink(missing_ok=True)
