"""Writing token bundles: documents go in one by one, and a complete file appears or none.

The number of tokens is known only at the end and a contiguous dataset cannot grow, so tokens are spooled to a
raw file first and copied once into the HDF5 file (sequential I/O twice; memory stays at one block). Commit
protocol: write NAME.partial, fsync it, rename it to NAME, fsync the directory. A crash at any point leaves
NAME absent or complete; what is left is called NAME.spool, NAME.targets.spool and NAME.partial.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from numpy.typing import NDArray

from zslurm.checkpoint_tools.checksum import crc32
from zslurm.checkpoint_tools.durable import replace_durably, sync
from zslurm.checkpoint_tools.quantities import counted
from zslurm.train.data.hdf5 import create_hdf5, write_text
from zslurm.train.data.schema import BLOCK_TOKENS, FORMAT, UNMASKED_VERSION, VERSION, BundleHeader, bundle_name
from zslurm.train.errors import DataError

BUNDLE_BYTES = 2 << 30
OFFSET_BYTES = 8  # of a document in /documents


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


class BundleWriter:
    """Writes one bundle. As a context manager it commits at the end, and discards on an exception.

    Not covered: two writers of one path at a time.
    """

    def __init__(self, path: Path, header: BundleHeader, *, masked: bool = False) -> None:
        """Begin a bundle; a `masked` one keeps of each token whether it counts as a target."""
        self.path = path
        self.header = header
        self._partial_path = path.with_name(path.name + ".partial")
        self._ends = array("Q", [0])
        self._spool = Spool(path.with_name(path.name + ".spool"))
        self._target_spool = Spool(path.with_name(path.name + ".targets.spool")) if masked else None

    @property
    def tokens(self) -> int:
        """Return the tokens appended so far."""
        return self._ends[-1]

    @property
    def documents(self) -> int:
        """Return the documents appended so far."""
        return len(self._ends) - 1

    def append(self, document: NDArray[np.integer], targets: NDArray[np.integer] | None = None) -> None:
        """Add one document: its token ids, integers [tokens], the end-of-document token included.

        `targets`, for a masked bundle, is 1 if the token counts as a target and 0 if it does not, integers
        [tokens]; by default all count.

        Raises:
            DataError: an id is negative or not below vocab_size, or the document is empty.
        """
        if not document.size:
            raise DataError(f"{self.path}: document {self.documents} has no tokens")
        low, high = int(document.min()), int(document.max())
        if low < 0 or high >= self.header.vocab_size:
            raise DataError(
                f"{self.path}: document {self.documents} has token id {low if low < 0 else high}, "
                f"but the vocabulary has {counted(self.header.vocab_size, 'entry')}; "
                "use the tokenizer that the ids came from"
            )
        self._spool.append(document.astype(self.header.token_dtype))
        if self._target_spool is not None:
            self._target_spool.append(_mask(document, targets))
        self._ends.append(self.tokens + document.size)

    def commit(self) -> Path:
        """Make the bundle visible under its name, durably.

        Raises:
            DataError: no document was appended.
        """
        if not self.documents:
            raise DataError(f"{self.path}: a bundle needs at least one document")
        with create_hdf5(self._partial_path) as file:
            self._write_header(file)
            self._write_blocks(file, "tokens", "checksums", self._spool, self.header.token_dtype)
            self._write_documents(file)
            if self._target_spool is not None:
                self._write_blocks(file, "targets", "target_checksums", self._target_spool, np.dtype("u1"))
        replace_durably(self._partial_path, self.path)
        self.discard()
        return self.path

    def discard(self) -> None:
        """Remove everything unfinished; after a commit there is only the spool."""
        self._spool.discard()
        if self._target_spool is not None:
            self._target_spool.discard()
        self._partial_path.unlink(missing_ok=True)

    def __enter__(self) -> BundleWriter:
        return self

    def __exit__(self, kind: type[BaseException] | None, *details: object) -> None:
        try:
            if kind is None:
                self.commit()
        finally:
            self.discard()

    def _write_header(self, file: Any) -> None:
        write_text(file, "format", FORMAT)
        file.attrs["version"] = VERSION if self._target_spool is not None else UNMASKED_VERSION
        file.attrs["vocab_size"] = self.header.vocab_size
        write_text(file, "tokenizer_sha256", self.header.tokenizer_sha256)
        file.attrs["end_token"] = self.header.end_token
        write_text(file, "source", self.header.source)
        file.attrs["tokens"] = self.tokens
        file.attrs["documents"] = self.documents

    def _write_blocks(self, file: Any, name: str, checksums_name: str, spool: Spool, dtype: np.dtype) -> None:
        """Write one element for each token, and a CRC32 of each block."""
        elements = file.create_dataset(name, shape=(self.tokens,), dtype=dtype)
        checksums = []
        for start, block in zip(
            range(0, self.tokens, BLOCK_TOKENS), spool.read(BLOCK_TOKENS * dtype.itemsize), strict=True
        ):
            checksums.append(crc32(block))
            elements[start : start + BLOCK_TOKENS] = np.frombuffer(block, dtype)
        table = file.create_dataset(checksums_name, data=np.array(checksums, dtype="<u4"))
        table.attrs["block_tokens"] = BLOCK_TOKENS

    def _write_documents(self, file: Any) -> None:
        offsets = np.array(self._ends, dtype="<u8")
        documents = file.create_dataset("documents", data=offsets)
        documents.attrs["crc32"] = crc32(offsets.tobytes())


class RollingWriter:
    """Writes a directory of bundles of at most `bundle_bytes` each; a larger document has one to itself.

    How many bundles there are is known at the end only, when `commit` gives them their names. As a context manager
    it discards the unfinished bundle on an exception; finished ones stay.
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
        """Begin, or continue after `finished` bundles that are in `directory` already."""
        self.finished = finished
        self._directory, self._header, self._limit, self._masked = directory, header, bundle_bytes, masked
        self._token_bytes = header.token_dtype.itemsize + int(masked)
        self._writer: BundleWriter | None = None

    def has_room_for(self, tokens: int) -> bool:
        """Return whether the unfinished bundle takes a document of `tokens` tokens, or must be finished."""
        if self._writer is None:
            return True
        size = (self._writer.tokens + tokens) * self._token_bytes + (self._writer.documents + 1) * OFFSET_BYTES
        return size <= self._limit

    def append(self, document: NDArray[np.integer], targets: NDArray[np.integer] | None = None) -> None:
        """Add one document to the unfinished bundle, as BundleWriter.append."""
        if self._writer is None:
            self._writer = BundleWriter(
                part_path(self._directory, self.finished), self._header, masked=self._masked
            )
        self._writer.append(document, targets)

    def finish(self) -> None:
        """Write the bundle out, durably; the next document begins another."""
        if self._writer is not None:
            self._writer.commit()
            self._writer = None
            self.finished += 1

    def commit(self) -> int:
        """Finish the last bundle, give all of them their names, and return how many there are."""
        self.finish()
        for part in range(self.finished):
            part_path(self._directory, part).replace(self._directory / bundle_name(part, self.finished))
        sync(self._directory)
        return self.finished

    def __enter__(self) -> RollingWriter:
        return self

    def __exit__(self, *error: object) -> None:
        if self._writer is not None:
            self._writer.discard()


def part_path(directory: Path, part: int) -> Path:
    """Return the path of bundle `part` (from 0) before all are finished."""
    return directory / f"part-{part:05d}.h5"


def _mask(document: NDArray[np.integer], targets: NDArray[np.integer] | None) -> NDArray[np.uint8]:
    """Return the mask of one document, uint8 [tokens]."""
    if targets is None:
        return np.ones(document.size, np.uint8)
    if targets.shape != document.shape or targets.min() < 0 or targets.max() > 1:
        raise ValueError(
            f"a mask is 0 or 1 for each of {counted(document.size, 'token')}, got {targets.shape} of others"
        )
    return targets.astype(np.uint8)
