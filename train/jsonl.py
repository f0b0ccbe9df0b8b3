"""Append-only files of JSON lines: one writer each, any number of readers, also while it is written.

A line is appended by one write call on a descriptor opened with O_APPEND, so readers see whole lines; a crash
can leave at most one unfinished last line, which readers skip and the next writer closes with a line break.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator
from functools import lru_cache
from io import BytesIO
from pathlib import Path
from typing import Any

from zslurm.checkpoint_tools.plain import load_json

_BLOCK = 1 << 18  # bytes that are read at once
_DECODER = json.JSONDecoder()
_TYPES: dict[str, tuple[type, ...]] = {
    **dict.fromkeys(
        ("event", "action", "kind", "outcome", "job_id", "launcher", "cluster", "user", "successor"), (str,)
    ),
    **dict.fromkeys(("attempt", "step", "exit_code", "tokens"), (int,)),
    **dict.fromkeys(("time", "loss", "lr", "grad_norm", "tokens_per_s", "mfu", "step_time_s"), (int, float)),
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
        self._path = path
        self._fd = os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o666)
        size = os.fstat(self._fd).st_size
        if size and os.pread(self._fd, 1, size - 1) != b"\n":
            os.write(self._fd, b"\n")

    def append(self, record: dict[str, Any]) -> None:
        """Append one record, or nothing.

        Raises:
            OSError: the disk or a quota is full, the file may not grow, or the file system is gone.
        """
        line = json.dumps(record, separators=(",", ":"), allow_nan=True).encode() + b"\n"
        written = 0
        try:
            while written < len(line):  # after a part of a line, the next write says why there was no more
                written += os.write(self._fd, line[written:])
        except OSError as error:
            if written:
                os.ftruncate(self._fd, os.fstat(self._fd).st_size - written)
            raise OSError(error.errno, error.strerror, str(self._path)) from error

    def size(self) -> int:
        """Return the bytes in the file."""
        return os.fstat(self._fd).st_size

    def close(self) -> None:
        """Close the file."""
        os.close(self._fd)

    def __enter__(self) -> JsonLinesWriter:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def read_jsonl(path: Path) -> Iterator[dict[str, Any]]:
    """Yield every whole, well-formed record of a file; none if the file is missing."""
    try:
        with path.open("rb") as file:
            for line in file:
                record = parse_line(line)
                if record is not None:
                    yield record
    except FileNotFoundError:
        return


def _decode(line: bytes) -> Any:
    text = line.decode()
    value, end = _DECODER.raw_decode(text)  # takes half the time of `json.loads`, which also finds encodings
    return value if end == len(text) - 1 else load_json(line)


def parse_line(line: bytes, decode: Callable[[bytes], Any] = _decode) -> dict[str, Any] | None:
    """Return a line's record; None for an unfinished or damaged one.

    `decode` parses JSON and raises ValueError or RecursionError if a line is none.
    """
    if not line.endswith(b"\n"):
        return None
    try:
        record = decode(line)
    except (ValueError, RecursionError):
        return None
    if not isinstance(record, dict) or not _is_sound(tuple(record), tuple(map(type, record.values()))):
        return None
    return record


@lru_cache(maxsize=1024)
def _is_sound(names: tuple[str, ...], types: tuple[type, ...]) -> bool:
    """Return whether the fields that every reader uses are of their type: a damaged line may hold anything."""
    pairs = ((_TYPES[name], kind) for name, kind in zip(names, types, strict=True) if name in _TYPES)
    return all(kind in (*expected, type(None)) for expected, kind in pairs)


def lines_backwards(path: Path, end: int | None = None) -> Iterator[bytes]:
    """Yield the lines of a file with their line breaks, the last one first; none if the file is missing.

    The file is read only as far as lines are taken, from byte `end` backwards (default: its size).
    """
    try:
        with path.open("rb") as file:
            position, begun = file.seek(0, os.SEEK_END) if end is None else end, b""
            while position:
                size = min(_BLOCK, position)
                position -= size
                file.seek(position)
                lines = BytesIO(file.read(size) + begun).readlines()  # divides at \n only
                begun = lines.pop(0) if lines else b""
                yield from reversed(lines)
            if begun:
                yield begun
    except FileNotFoundError:
        return


class JsonLinesTail:
    """Reads what was appended to a file of JSON lines since the last look.

    Attributes:
        path: the file.
        damaged: how many of the lines that were read cannot be understood, and were left out.
    """

    def __init__(self, path: Path, decode: Callable[[bytes], Any] = _decode) -> None:
        """Begin before the first line; `decode` is as in `parse_line`."""
        self.path = path
        self.damaged = 0
        self._decode = decode
        self._offset = 0

    def new_records(self) -> list[dict[str, Any]]:
        """Return the whole records that were appended since the last call."""
        return list(self.iter_records())

    def iter_records(self) -> Iterator[dict[str, Any]]:
        """Yield the whole records that were appended since the last call, without keeping them in memory."""
        try:
            with self.path.open("rb") as file:
                file.seek(self._offset)
                for line in file:
                    if not line.endswith(b"\n"):
                        return
                    self._offset += len(line)
                    record = parse_line(line, self._decode)
                    if record is not None:
                        yield record
                    elif line.strip():
                        self.damaged += 1
        except FileNotFoundError:
            return

    def newest_records(self, count: int) -> list[dict[str, Any]]:
        """Return the last whole records, oldest first, at most `count`; the next call continues behind them."""
        records: list[dict[str, Any]] = []
        try:
            end = self.path.stat().st_size
        except FileNotFoundError:
            return []
        for line in lines_backwards(self.path, end):
            if not line.endswith(b"\n"):  # the last one is unfinished
                end -= len(line)
                continue
            if len(records) == count:
                break
            record = parse_line(line, self._decode)
            if record is not None:
                records.append(record)
            elif line.strip():
                self.damaged += 1
        self._offset = end
        return records[::-1]
