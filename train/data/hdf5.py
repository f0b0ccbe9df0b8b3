"""The only code that touches HDF5: opening, creating, and locating a dataset's bytes.

Whatever is wrong with a file becomes one DataError that names it and what to do.
File locking is off: flock is unreliable on NFS and Lustre, and bundles are never changed in place.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from zslurm.checkpoint_tools.quantities import counted

os.environ.setdefault("HDF5_USE_FILE_LOCKING", "FALSE")  # read when the library loads

import h5py
import numpy as np

from zslurm.train.data.schema import AGAIN, ALIGNMENT, BUILD_HINT
from zslurm.train.errors import DataError

HDF5_SIGNATURE = b"\x89HDF\r\n\x1a\n"


@dataclass(frozen=True)
class DatasetRange:
    """The range of a contiguous dataset in its file."""

    offset: int  # bytes
    dtype: np.dtype
    length: int  # elements

    def map(self, path: Path) -> np.memmap:
        """Return the dataset as a read-only mapping."""
        return np.memmap(path, self.dtype, mode="r", offset=self.offset, shape=(self.length,))

    def read(self, file: BinaryIO, start: int, count: int) -> bytes:
        """Elements [start, start + count), read and not mapped: a file that shrinks gives fewer bytes."""
        size = self.dtype.itemsize
        return os.pread(file.fileno(), count * size, self.offset + start * size)


@contextmanager
def open_hdf5(path: Path) -> Iterator[h5py.File]:
    """Open a file for reading.

    Raises:
        DataError: it is missing, unreadable, empty, not HDF5, truncated, or reading it in the body failed.
    """
    try:
        if path.is_dir():
            raise DataError(f"{path}: is a directory, not a bundle")
        with path.open("rb") as raw:
            signature = raw.read(len(HDF5_SIGNATURE))
    except FileNotFoundError:
        raise DataError(f"{path}: no such file or directory; check the path, or {BUILD_HINT}") from None
    except OSError as error:
        raise DataError(f"{path}: cannot be read: {error.strerror}") from error
    if not signature:
        raise DataError(f"{path}: is empty (zero bytes); {AGAIN}")
    if signature != HDF5_SIGNATURE:
        raise DataError(f"{path}: is not an HDF5 file; {BUILD_HINT}")
    try:
        with h5py.File(path, "r", locking=False) as file:
            yield file
    except (OSError, KeyError, ValueError, TypeError, RuntimeError, AttributeError) as error:
        reason = " ".join(str(error).split()).strip("'\"")
        state = "truncated" if "truncated" in reason else "damaged"
        raise DataError(f"{path}: is {state} ({reason}); {AGAIN}") from error


@contextmanager
def create_hdf5(path: Path) -> Iterator[h5py.File]:
    """Create a file whose larger datasets start on a page and whose metadata carry checksums.

    Without checksums a flipped bit in the metadata may hang or crash the library instead of being reported.
    The oldest format that has them is HDF5 1.8's.

    Raises:
        OSError: there is no room, or it cannot be written for another reason.
    """
    try:
        with h5py.File(
            path,
            "w",
            libver=("v108", "v108"),
            locking=False,
            alignment_threshold=ALIGNMENT // 2,
            alignment_interval=ALIGNMENT,
        ) as file:
            yield file
    except (OSError, RuntimeError) as error:  # the latter where the file cannot be closed
        if match := re.search(r"errno = (\d+)", str(error)):
            raise OSError(int(match[1]), os.strerror(int(match[1]))) from error
        if isinstance(error, OSError):
            raise
        raise OSError(" ".join(str(error).split())) from error


def write_text(file: h5py.File, name: str, text: str) -> None:
    """Set a text attribute of the root group, of fixed length: the heap of variable ones has no checksum."""
    encoded = text.encode("utf-8", "backslashreplace")  # a path may hold bytes that are not UTF-8
    file.attrs.create(name, encoded, dtype=h5py.string_dtype("utf-8", max(1, len(encoded))))


def read_text(file: h5py.File, name: str) -> str:
    """Return a text attribute of the root group."""
    value = file.attrs[name]
    return value.decode() if isinstance(value, bytes) else str(value)


def locate(path: Path, file: h5py.File, name: str) -> DatasetRange:
    """Return the range of a one-dimensional dataset.

    Raises:
        DataError: it is chunked, has no data, or reaches beyond the end of the file.
    """
    dataset = file[name]
    if dataset.chunks is not None:
        raise DataError(
            f"{path}: {name} is stored in chunks and cannot be memory-mapped; "
            f"write it contiguously, or {BUILD_HINT}"
        )
    offset, (length,) = dataset.id.get_offset(), dataset.shape
    if offset is None:
        raise DataError(f"{path}: {name} has no data; {AGAIN}")
    needed, size = offset + length * dataset.dtype.itemsize, path.stat().st_size
    if needed > size:
        raise DataError(
            f"{path}: is truncated: {name} needs {counted(needed, 'byte')}, the file has {size}; {AGAIN}"
        )
    return DatasetRange(int(offset), dataset.dtype, int(length))
