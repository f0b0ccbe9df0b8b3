"""Records as they are read from the sources: lines of JSON, rows of Parquet, whole text files.

One process reads, in order, as little as it must: lines are not parsed and text files not opened here, that is the
work of `train/data/build/documents.py` in the processes that tokenize. Memory is bounded by one batch, whatever
the size of the files; a record larger than the limit is refused before it is read (Parquet's: after it was).

A cursor is the start of a record, so that reading can continue there: at once in plain files, by decompressing
what is before it in compressed ones, at its row group in Parquet.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import IO, Any, NamedTuple

from zslurm.checkpoint_tools.quantities import show_bytes
from zslurm.train.data.build.chat import ChatTemplate
from zslurm.train.data.build.compressed import open_source, skip
from zslurm.train.data.build.sources import SourceFile, SourceKind
from zslurm.train.errors import DataError

BATCH_BYTES = 256 << 10
BATCH_RECORDS = 4096
MAX_DOCUMENT_BYTES = 32 << 20
PARQUET_ROWS = 64  # decoded at a time


class Cursor(NamedTuple):
    """The start of a record."""

    file: int  # in the list of sources
    record: int = 0  # lines or rows of the file before it
    offset: int = 0  # bytes of the decompressed file before it; JSON lines only


START = Cursor(0)


@dataclass(frozen=True)
class Fields:
    """Which fields of a record are its text: one, a prompt and its completion, or the messages of a chat."""

    text_key: str = "text"
    text_column: str = "text"
    prompt_key: str | None = None
    completion_key: str | None = None
    chat_key: str | None = None

    def of(self, kind: SourceKind) -> tuple[str, ...]:
        """Return the names of the fields in a file of this kind."""
        if self.chat_key is not None:
            return (self.chat_key,)
        if self.prompt_key is not None and self.completion_key is not None:
            return (self.prompt_key, self.completion_key)
        return (self.text_column if kind is SourceKind.PARQUET else self.text_key,)

    @property
    def paired(self) -> bool:
        """Return whether a document is a prompt and its completion."""
        return self.prompt_key is not None

    @property
    def masked(self) -> bool:
        """Return whether some tokens of a document may not count as targets."""
        return self.paired or self.chat_key is not None


@dataclass(frozen=True)
class Raw:
    """A record as it was read.

    `content` is a line of JSON, the values of a row, or None for a text file, which is still to be read.
    """

    file: SourceFile
    cursor: Cursor
    content: bytes | tuple[Any, ...] | None

    @property
    def where(self) -> str:
        """Return the record for people: FILE, FILE:LINE (from 1), or FILE: row ROW (from 0)."""
        if self.file.kind is SourceKind.JSON_LINES:
            return f"{self.file.path}:{self.cursor.record + 1}"
        return str(self.file.path) + (
            f": row {self.cursor.record}" if self.file.kind is SourceKind.PARQUET else ""
        )


@dataclass(frozen=True)
class RecordBatch:
    """Records that are worked on together, and how many bytes of the sources end with them."""

    records: list[Raw]
    done: int


@dataclass(frozen=True)
class SourceReader:
    """Reads the records of files in order."""

    files: Sequence[SourceFile]
    fields: Fields
    max_document_bytes: int = MAX_DOCUMENT_BYTES
    chat: ChatTemplate | None = None  # of conversations

    def batches(self, start: Cursor = START) -> Iterator[RecordBatch]:
        """Yield all records from `start` on, in batches of about BATCH_BYTES, or of BATCH_RECORDS short ones.

        Raises:
            DataError: a file cannot be read, is damaged, lacks a column, or a record is too large.
        """
        records: list[Raw] = []
        size = 0
        for raw, record_bytes, done in self.records(start):
            records.append(raw)
            size += record_bytes
            if size >= BATCH_BYTES or len(records) >= BATCH_RECORDS:
                yield RecordBatch(records, done)
                records, size = [], 0
        if records:
            yield RecordBatch(records, sum(file.size for file in self.files))

    def records(self, start: Cursor = START) -> Iterator[tuple[Raw, int, int]]:
        """Yield each record from `start` on, its bytes, and the bytes of the sources up to its end."""
        before = sum(file.size for file in self.files[: start.file])
        for number in range(start.file, len(self.files)):
            file = self.files[number]
            first = start if number == start.file else Cursor(number)
            for raw, size, done in self.records_of(file, first):
                yield raw, size, before + min(done, file.size)
            before += file.size

    def records_of(self, file: SourceFile, start: Cursor) -> Iterator[tuple[Raw, int, int]]:
        """Yield the records of one file from `start` on, as `records`, the bytes counted from its beginning."""
        if file.kind is SourceKind.TEXT:
            if not file.compression:
                self.check_size(str(file.path), file.size)
            yield Raw(file, start, None), file.size, file.size
        elif file.kind is SourceKind.JSON_LINES:
            with open_source(file) as (stream, position):
                yield from self._lines(file, start, stream, position)
        else:
            yield from self._rows(file, start)

    def check_size(self, where: str, size: int) -> None:
        """Raise a DataError if one document is too large to be held in memory several times."""
        if size > self.max_document_bytes:
            raise DataError(
                f"{where}: holds {show_bytes(size)} in one document, more than the limit of "
                f"{show_bytes(self.max_document_bytes)}; split it, or raise the limit (--max-document)"
            )

    def _lines(
        self, file: SourceFile, start: Cursor, stream: IO[bytes], position: IO[bytes]
    ) -> Iterator[tuple[Raw, int, int]]:
        skip(stream, start.offset)
        _, line, offset = start
        while content := stream.readline(self.max_document_bytes + 1):
            raw = Raw(file, Cursor(start.file, line, offset), content)
            if len(content) > self.max_document_bytes:
                raise DataError(
                    f"{raw.where}: the line is longer than {show_bytes(self.max_document_bytes)}; "
                    "split it, or raise the limit (--max-document)"
                )
            line, offset = line + 1, offset + len(content)
            if not content.isspace():
                yield raw, len(content), position.tell()

    def _rows(self, file: SourceFile, start: Cursor) -> Iterator[tuple[Raw, int, int]]:
        from zslurm.train.data.build.parquet import read_rows

        columns, nested = self.fields.of(SourceKind.PARQUET), self.chat is not None
        for row, values, total in read_rows(file.path, columns, start.record, PARQUET_ROWS, nested=nested):
            raw = Raw(file, Cursor(start.file, row), values)
            size = sum(len(value if isinstance(value, str) else str(value)) for value in values)
            self.check_size(raw.where, size)
            yield raw, size, file.size * (row + 1) // total
