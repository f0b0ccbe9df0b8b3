"""Writing a token bundle: documents go in one by one, and a complete file appears or none.

The number of tokens is known only at the end and a contiguous dataset cannot grow, so tokens are spooled to a
raw file first and copied once into the HDF5 file (sequential I/O twice; memory stays at one block). Commit
protocol: write NAME.partial, fsync it, rename it to NAME, fsync the directory. A crash at any point leaves
NAME absent or complete; the leavings are called NAME.spool and NAME.partial.
"""

from __future__ import annotations

import os
import zlib
from array import array
from pathlib import Path
from types import TracebackType
from typing import Any, BinaryIO

import numpy as np
from numpy.typing import NDArray

from train.data.hdf5 import create_hdf5, write_text
from train.data.schema import BLOCK_TOKENS, FORMAT, VERSION, BundleHeader, bundle_name
from train.errors import DataError


class BundleWriter:
    """Writes one bundle. As a context manager it commits at the end, and discards on an exception.

    Not covered: two writers of one path at a time.
    """

    def __init__(self, path: Path, header: BundleHeader) -> None:
        self.path = path
        self.header = header
        self._spool_path = path.with_name(path.name + ".spool")
        self._partial_path = path.with_name(path.name + ".partial")
        self._ends = array("Q", [0])
        self._spool: BinaryIO = self._spool_path.open("w+b")

    @property
    def tokens(self) -> int:
        """Tokens appended so far."""
        return self._ends[-1]

    @property
    def documents(self) -> int:
        """Documents appended so far."""
        return len(self._ends) - 1

    def append(self, document: NDArray[np.integer]) -> None:
        """Add one document: its token ids, integers [tokens], the end-of-document token included.

        Raises:
            DataError: an id is negative or not below vocab_size, or the document is empty.
        """
        if not document.size:
            raise DataError(f"{self.path}: document {self.documents} has no tokens")
        low, high = int(document.min()), int(document.max())
        if low < 0 or high >= self.header.vocab_size:
            raise DataError(
                f"{self.path}: document {self.documents} has token id {low if low < 0 else high}, "
                f"but the vocabulary has {self.header.vocab_size} entries; "
                "use the tokenizer that the ids came from"
            )
        self._spool.write(document.astype(self.header.token_dtype).tobytes())
        self._ends.append(self.tokens + document.size)

    def commit(self) -> Path:
        """Make the bundle visible under its name, durably.

        Raises:
            DataError: no document was appended.
        """
        if not self.documents:
            raise DataError(f"{self.path}: a bundle needs at least one document")
        self._spool.flush()
        self._spool.seek(0)
        with create_hdf5(self._partial_path) as file:
            self._write_header(file)
            self._write_tokens(file)
            self._write_documents(file)
        fsync(self._partial_path)
        self._partial_path.replace(self.path)
        fsync(self.path.parent)
        self.discard()
        return self.path

    def discard(self) -> None:
        """Remove everything unfinished; after a commit there is only the spool."""
        self._spool.close()
        self._spool_path.unlink(missing_ok=True)
        self._partial_path.unlink(missing_ok=True)

    def __enter__(self) -> BundleWriter:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            if kind is None:
                self.commit()
        finally:
            self.discard()

    def _write_header(self, file: Any) -> None:
        write_text(file, "format", FORMAT)
        file.attrs["version"] = VERSION
        file.attrs["vocab_size"] = self.header.vocab_size
        write_text(file, "tokenizer_sha256", self.header.tokenizer_sha256)
        file.attrs["end_token"] = self.header.end_token
        write_text(file, "source", self.header.source)
        file.attrs["tokens"] = self.tokens
        file.attrs["documents"] = self.documents

    def _write_tokens(self, file: Any) -> None:
        dtype = self.header.token_dtype
        tokens = file.create_dataset("tokens", shape=(self.tokens,), dtype=dtype)
        checksums = []
        for start in range(0, self.tokens, BLOCK_TOKENS):
            block = self._spool.read(min(BLOCK_TOKENS, self.tokens - start) * dtype.itemsize)
            checksums.append(zlib.crc32(block))
            tokens[start : start + BLOCK_TOKENS] = np.frombuffer(block, dtype)
        table = file.create_dataset("checksums", data=np.array(checksums, dtype="<u4"))
        table.attrs["block_tokens"] = BLOCK_TOKENS

    def _write_documents(self, file: Any) -> None:
        offsets = np.array(self._ends, dtype="<u8")
        documents = file.create_dataset("documents", data=offsets)
        documents.attrs["crc32"] = zlib.crc32(offsets.tobytes())


class BundleSeries:
    """Writes a directory of bundles of at most `limit` tokens each; a document is never split over two.

    How many bundles there are is known at the end only, when they get their names. As a context manager it
    commits at the end (if it has documents), and discards the unfinished bundle on an exception.
    """

    def __init__(self, directory: Path, header: BundleHeader, limit: int) -> None:
        self._directory = directory
        self._header = header
        self._limit = limit
        self._finished: list[Path] = []
        self._writer: BundleWriter | None = None
        self.documents = 0

    def append(self, document: NDArray[np.integer]) -> None:
        """Add one document, as BundleWriter.append."""
        if self._writer is not None and self._writer.tokens + document.size > self._limit:
            self._finish_bundle()
        if self._writer is None:
            part = len(self._finished)
            self._writer = BundleWriter(self._directory / f"part-{part:05d}.h5", self._header)
        self._writer.append(document)
        self.documents += 1

    def commit(self) -> None:
        """Finish the last bundle and give all of them their names."""
        self._finish_bundle()
        for part, path in enumerate(self._finished):
            path.replace(self._directory / bundle_name(part, len(self._finished)))
        fsync(self._directory)

    def __enter__(self) -> BundleSeries:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is None:
            self.commit()
        elif self._writer is not None:
            self._writer.discard()

    def _finish_bundle(self) -> None:
        if self._writer is not None:
            self._finished.append(self._writer.commit())
            self._writer = None


def fsync(path: Path) -> None:
    """Force a file's bytes, or a directory's entries, to stable storage."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
