"""Append-only files of JSON lines: one writer each, any number of readers, also while it is written.

A line is appended by one write call on a descriptor opened with O_APPEND, so readers see whole lines; a crash
can leave at most one unfinished last line, which readers skip and the next writer closes with a line break.
"""

from __future__ import annotations

import errno
import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from zslurm.checkpoint_tools.plain import load_json

_NUMBER = (int, float)
_TYPES: dict[str, Any] = {
    **dict.fromkeys(
        ("event", "action", "kind", "outcome", "job_id", "launcher", "cluster", "user", "successor"), str
    ),
    **dict.fromkeys(("attempt", "step", "exit_code", "tokens"), int),
    **dict.fromkeys(("time", "loss", "lr", "grad_norm", "tokens_per_s", "mfu", "step_time_s"), _NUMBER),
}
"""Types of the fields that the readers of a run's files rely on."""


Record = Callable[..., None]
"""Records a line of metrics.jsonl: of a kind, the only argument without a name, and with its fields."""


class JsonLinesWriter:
    """The one writer of a file of JSON lines. Use as a context manager, or call close()."""

    def __init__(self, path: Path) -> None:
        """Open `path` for appending, creating it; closes a line that a crash left unfinished.

        Raises:
            OSError: the file cannot be opened or written.
        """
        self._fd = os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o666)
        size = os.fstat(self._fd).st_size
        if size and os.pread(self._fd, 1, size - 1) != b"\n":
            os.write(self._fd, b"\n")

    def append(self, record: dict[str, Any]) -> None:
        """Append one record, or nothing.

        Raises:
            OSError: the disk is full or the file system is gone.
        """
        line = json.dumps(record, separators=(",", ":"), allow_nan=True).encode() + b"\n"
        written = os.write(self._fd, line)
        if written < len(line):
            os.ftruncate(self._fd, os.fstat(self._fd).st_size - written)
            raise OSError(errno.ENOSPC, "no space for a whole line")

    def close(self) -> None:
        """Close the file."""
        os.close(self._fd)

    def __enter__(self) -> JsonLinesWriter:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def read_jsonl(path: Path) -> Iterator[dict[str, Any]]:
    """Yield every whole, well-formed record of a file; none where the file is missing."""
    try:
        with path.open("rb") as file:
            for line in file:
                record = parse_line(line)
                if record is not None:
                    yield record
    except FileNotFoundError:
        return


def parse_line(line: bytes) -> dict[str, Any] | None:
    """Return a line's record; None for an unfinished or damaged one."""
    if not line.endswith(b"\n"):
        return None
    try:
        record = load_json(line)
    except ValueError:
        return None
    return record if isinstance(record, dict) and _is_sound(record) else None


def _is_sound(record: dict[str, Any]) -> bool:
    """Return whether the fields that every reader uses are of their type: a damaged line may hold anything."""
    relied_on = [(value, _TYPES[name]) for name, value in record.items() if name in _TYPES and value is not None]
    return all(isinstance(value, kinds) and not isinstance(value, bool) for value, kinds in relied_on)


class JsonLinesTail:
    """Reads what was appended to a file of JSON lines since the last look."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._offset = 0

    def new_records(self) -> list[dict[str, Any]]:
        """Return the whole records that were appended since the last call."""
        try:
            with self._path.open("rb") as file:
                file.seek(self._offset)
                block = file.read()
        except FileNotFoundError:
            return []
        whole = block[: block.rfind(b"\n") + 1]
        self._offset += len(whole)
        parsed = [parse_line(line) for line in whole.splitlines(keepends=True)]
        return [record for record in parsed if record is not None]
