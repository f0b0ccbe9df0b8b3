"""What gives lines of the kernel log: only what is new since a position.

Each source gives what came since the last call, and never waits. It is opened at its end, or at the position that
a source of the same kind was at before, in this process or in another: the number of a record and its boot, the
inode and offset of a file, the time of the journal.
"""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Mapping

CHUNK = 1 << 16
_LONGEST_LINE = 1 << 16
MOST_RECORDS = 2000
"""Lines of one call: a storm of them must not hold the sensor; the rest comes with the next."""

Position = Mapping[str, int | float | str]
"""Where a source is; each kind has its own keys."""

_PREFIX = re.compile(
    r"(?:<\d+>)?"  # level, raw
    r"(?:\[ *\d+\.\d+\] \S+ kernel: "  # journalctl -o short-monotonic
    r"|(?:\w{3} [ \d]\d [\d:]{8}|\d{4}-\S+) \S+ kernel: )?"  # syslog, journalctl -o short or short-iso
    r"(?:kernel: )?(?:\[ *\d+\.\d+\] ?)?"  # dmesg
)


class Unavailable(Exception):
    """The kernel log cannot be read; the message is the reason."""


class NoMoreLines(Unavailable):
    """The source is of no more use: another must be opened."""


class Source(ABC):
    """Gives new lines of the kernel log."""

    @abstractmethod
    def lines(self) -> list[str]:
        """Return what came since the last call, oldest first.

        Raises:
            Unavailable: it cannot be read now.
            NoMoreLines: nor ever again.
        """

    @abstractmethod
    def position(self) -> Position:
        """Return the position of the next call, such that a source that is opened there misses nothing."""

    @abstractmethod
    def close(self) -> None:
        """Release what is open."""


def text_of(line: str) -> str:
    """Return the kernel's message in a line, without time, host and level."""
    prefix = _PREFIX.match(line)
    return line[prefix.end() :] if prefix else line


class LineSplitter:
    """Cuts a stream of bytes into lines. One without end is cut if it is too long."""

    def __init__(self) -> None:
        self._rest = b""

    def feed(self, chunk: bytes) -> list[str]:
        """Return the lines that a chunk completes."""
        *complete, self._rest = (self._rest + chunk).split(b"\n")
        if len(self._rest) > _LONGEST_LINE:
            complete, self._rest = [*complete, self._rest], b""
        return [line[:_LONGEST_LINE].decode("utf-8", errors="replace").rstrip("\r") for line in complete]

    @property
    def waiting(self) -> int:
        """Bytes of the line that is not complete yet."""
        return len(self._rest)

    def reset(self) -> None:
        """Forget the beginning of a line."""
        self._rest = b""
