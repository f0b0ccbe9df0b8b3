"""A file of kernel lines, as syslog writes it."""

from __future__ import annotations

import glob
import os
from contextlib import suppress
from pathlib import Path

from zslurm.aegis.agent.kernel_source.source import (
    CHUNK,
    MOST_RECORDS,
    LineSplitter,
    Position,
    Source,
    Unavailable,
    text_of,
)

_MOST_AGAIN = 16 << 20
"""Bytes of a file that are read again, at most: the newest."""


class LogFile(Source):
    """A file that grows, is rotated (renamed, and made again) or truncated: `tail -n 0 -F`.

    One that is not there yet is read from its beginning once it is. One that was rotated since a position is found
    next to its name, by its inode; if it is gone, the file that bears the name now is read from its beginning.
    """

    def __init__(self, path: Path, at: Position | None = None) -> None:
        """Open the file if it exists.

        Args:
            path: of the file.
            at: a position of before; None: its end.
        """
        self._path = path
        self._splitter = LineSplitter()
        self._fd: int | None = None
        self._read = 0
        with suppress(Unavailable):
            if at is None or "inode" not in at:
                self._open()
                self._seek(None)
            else:
                self._open_at(at)

    def _open_at(self, at: Position) -> None:
        """Open the file at a position.

        Raises:
            Unavailable: there is no file.
        """
        identity = (at.get("device"), at.get("inode"))
        for path in (self._path, *sorted(self._path.parent.glob(f"{glob.escape(self._path.name)}?*"))):
            with suppress(OSError):
                status = path.stat()
                if (status.st_dev, status.st_ino) == identity:
                    self._open(path)
                    offset = at.get("offset")
                    self._seek(offset if isinstance(offset, int) and 0 <= offset <= status.st_size else 0)
                    return
        self._open()
        self._seek(0)

    def _seek(self, offset: int | None) -> None:
        """Go there, or to the end; never so far before it that reading on would take forever."""
        assert self._fd is not None
        end = os.lseek(self._fd, 0, os.SEEK_END)
        self._read = end if offset is None else max(offset, end - _MOST_AGAIN)
        os.lseek(self._fd, self._read, os.SEEK_SET)

    def position(self) -> Position:
        """See Source."""
        if self._fd is None:
            return {"device": 0, "inode": 0, "offset": 0}
        status = os.fstat(self._fd)
        offset = self._read - self._splitter.waiting
        return {"device": status.st_dev, "inode": status.st_ino, "offset": offset}

    def lines(self) -> list[str]:
        """See Source."""
        read_lines: list[str] = []
        if self._fd is None:
            self._open()
        read_lines += self._drain()
        if self._was_replaced():
            read_lines += self._drain()  # what came between the last look and the rename
            self.close()
            self._open()
            read_lines += self._drain()
        return read_lines

    def _open(self, path: Path | None = None) -> None:
        try:
            self._fd = os.open(path or self._path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
        except OSError as error:
            raise Unavailable(f"{self._path}: {error.strerror}") from error
        self._read = 0
        self._splitter.reset()

    def _drain(self) -> list[str]:
        assert self._fd is not None
        read_lines: list[str] = []
        try:
            if os.fstat(self._fd).st_size < self._read:
                self._read = os.lseek(self._fd, 0, os.SEEK_SET)
                self._splitter.reset()
            while len(read_lines) < MOST_RECORDS and (chunk := os.read(self._fd, CHUNK)):
                self._read += len(chunk)
                read_lines += self._splitter.feed(chunk)
        except OSError as error:
            self.close()
            raise Unavailable(f"{self._path}: {error.strerror}") from error
        return [text_of(line) for line in read_lines]

    def _was_replaced(self) -> bool:
        """Return whether another file bears the name by now; while none does, the old one is read on."""
        assert self._fd is not None
        try:
            at_path = self._path.stat()
        except OSError:
            return False
        opened = os.fstat(self._fd)
        return (at_path.st_dev, at_path.st_ino) != (opened.st_dev, opened.st_ino)

    def close(self) -> None:
        """See Source."""
        if self._fd is not None:
            os.close(self._fd)
            self._fd = None
