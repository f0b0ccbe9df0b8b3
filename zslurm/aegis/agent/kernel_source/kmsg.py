"""/dev/kmsg: the kernel's own buffer.

It gives one record for each read (Documentation/ABI/testing/dev-kmsg): `6,339,5140900,-;text`, then lines
` KEY=value`. What user space wrote there has another facility than the kernel's 0, and is left out.
"""

from __future__ import annotations

import os
import re
from contextlib import suppress
from pathlib import Path

from zslurm.aegis.agent.kernel_source.source import CHUNK, MOST_RECORDS, Position, Source, Unavailable
from zslurm.core.files import read_text

_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
_ESCAPED = re.compile(rb"\\x([0-9a-f]{2})")


class Kmsg(Source):
    """/dev/kmsg."""

    def __init__(self, path: Path, at: Position | None = None) -> None:
        """Open the device.

        Args:
            path: of the device.
            at: a position of before; None, or one of another boot: its end.

        Raises:
            Unavailable: it may not be opened (kernel.dmesg_restrict, or a container without it).
        """
        self._path = path
        self._boot = read_text(_BOOT_ID) or ""
        self._next: bytes | None = None
        record_seen = at.get("record") if at is not None and at.get("boot") == self._boot else None
        self._record = -1
        try:
            self._fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
        except OSError as error:
            raise Unavailable(f"{path}: {error.strerror}") from error
        try:
            os.lseek(self._fd, 0, os.SEEK_SET)  # the oldest record; only reading shows the number of the newest
            self._skip(record_seen if isinstance(record_seen, int) else None)
        except (OSError, Unavailable) as error:
            self.close()
            raise Unavailable(f"{path}: {error.strerror if isinstance(error, OSError) else error}") from error

    def _skip(self, known: int | None) -> None:
        """Read on behind a record, or to the end.

        Raises:
            Unavailable: it cannot be read.
        """
        while (record := self._take()) is not None:
            number = record_number(record)
            if known is not None and number is not None and number > known:
                self._next = record
                return
            self._record = self._record if number is None else number

    def _take(self) -> bytes | None:
        """Return the next record; None if there is none yet.

        Raises:
            Unavailable: it cannot be read.
        """
        while True:
            try:
                return os.read(self._fd, CHUNK) or None
            except BlockingIOError:
                return None
            except BrokenPipeError:  # records were overwritten before they were read; the next read continues
                continue
            except OSError as error:
                raise Unavailable(f"{self._path}: {error.strerror}") from error

    def lines(self) -> list[str]:
        """See Source."""
        read_lines: list[str] = []
        for _ in range(MOST_RECORDS):
            record, self._next = self._next or self._take(), None
            if record is None:
                break
            number = record_number(record)
            self._record = self._record if number is None else number
            if (text := parse_record(record)) is not None:
                read_lines.append(text)
        return read_lines

    def position(self) -> Position:
        """See Source."""
        return {"boot": self._boot, "record": self._record}

    def close(self) -> None:
        """See Source."""
        with suppress(OSError):
            os.close(self._fd)


def record_number(record: bytes) -> int | None:
    """Return the number of a record of /dev/kmsg, its second field; None for garbage."""
    fields = record.partition(b";")[0].split(b",")
    return int(fields[1]) if len(fields) > 1 and fields[1].isdigit() else None


def parse_record(record: bytes) -> str | None:
    """Return the kernel's message in a record of /dev/kmsg; None for what user space wrote, and for garbage."""
    head, separator, remainder = record.partition(b";")
    priority = head.split(b",")[0]
    if not separator or not priority.isdigit() or int(priority) >> 3:
        return None
    text = remainder.split(b"\n")[0]
    return _ESCAPED.sub(lambda match: bytes([int(match[1], 16)]), text).decode("utf-8", errors="replace")
