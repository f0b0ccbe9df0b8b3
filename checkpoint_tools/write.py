"""One rank's shard, streamed from host buffers to a safetensors file, with checksums computed on the way.

Each byte is read twice (once for its CRC32, once by the kernel), not copied here, and leaves in one
`writev` per block of 4 MiB, however many tensors the block holds; write-back starts on the way, so the one fsync
at the end finds little left. CRC32 runs at tens of GB/s on one core (checksum.py), and both it and `writev`
release the GIL, so a writer thread does not hold up its trainer.

A shard is written under its final name inside a temporary directory, which `commit.py` gives the final name
when all ranks are done. Nothing here stages device memory, coordinates ranks or retries; a failed shard is
removed so that its space is free again.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any

from zslurm.checkpoint_tools.checksum import crc32
from zslurm.checkpoint_tools.durable import At, no_fault_hook, write_all, writing
from zslurm.checkpoint_tools.errors import Mismatch
from zslurm.checkpoint_tools.format import layout, shard_header
from zslurm.checkpoint_tools.format.manifest import BLOCK_SIZE, Buffer, StoredExtent
from zslurm.checkpoint_tools.format.manifest_json import FORMAT
from zslurm.checkpoint_tools.plain import StrPath
from zslurm.checkpoint_tools.quantities import counted
from zslurm.checkpoint_tools.report import ShardReport

if TYPE_CHECKING:
    import numpy.typing as npt

POINTS = ("shard: created", "shard: half written", "shard: written", "shard: synced")
"""Where `write_shard` calls `at`, in order."""

_MAX_PIECES = 1024  # IOV_MAX of Linux: pieces that one writev takes
_FLUSH_BYTES = 64 << 20  # written bytes after which the kernel is asked to start on them


StoredRow = tuple[StoredExtent | Buffer, tuple[int, ...]]
"""What a key of a shard holds, and the shape of its array there."""


@dataclass(frozen=True, slots=True, eq=False)
class Entry:
    """Elements [start, stop) of a tensor's state, row-major.

    `array` holds them, C-contiguous: one-dimensional for a part, or the whole tensor in its own shape, which
    other safetensors readers then see. `dtype` is needed if numpy has none: "BF16" for bits in a uint16.
    """

    tensor: str
    state: str
    start: int
    stop: int
    array: npt.NDArray[Any]
    dtype: str | None = None


@dataclass(frozen=True, slots=True, eq=False)
class BufferEntry:
    """A small array that only this rank writes, whole, C-contiguous (balancing bias, RNG state)."""

    name: str
    array: npt.NDArray[Any]
    dtype: str | None = None


def write_shard(
    directory: StrPath,
    rank: int,
    world_size: int,
    entries: Iterable[Entry],
    buffers: Iterable[BufferEntry] = (),
    *,
    block_size: int = BLOCK_SIZE,
    durable: bool = True,
    at: At = no_fault_hook,
) -> ShardReport:
    """Write what `rank` owns into `directory` (from `begin`) and sync it to disk; a rank may own nothing.

    Arrays must not change until this returns. All ranks of a save must pass the same `block_size`, in bytes.
    Without `durable` the file is not synced: for copies that may be lost.

    Raises:
        Mismatch: an array does not fit its range, is not contiguous, or cannot be stored; nothing was
            written.
        NoSpace, WriteFailed: the file system would not take it; the partial file is removed.
    """
    directory = Path(directory)
    if block_size < 1:
        raise Mismatch(f"block_size must be at least 1 byte, got {block_size}")
    name = layout.shard_name(rank, world_size)
    arrays: dict[str, npt.NDArray[Any]] = {}
    rows: list[StoredRow] = []
    stored: list[Entry | BufferEntry] = [*entries, *buffers]
    for entry in stored:
        row = _row(entry, name)
        if row.key in arrays:
            raise Mismatch(f"two arrays of rank {rank} have the same name; give each extent and buffer once")
        arrays[row.key] = entry.array
        rows.append((row, entry.array.shape))
    return write_rows(
        directory,
        rank,
        world_size,
        rows,
        lambda row: [_bytes_of(arrays[row.key])],
        block_size=block_size,
        half=len(rows) // 2 + 1,
        durable=durable,
        at=at,
    )


def write_rows(
    directory: Path,
    rank: int,
    world_size: int,
    rows: Sequence[StoredRow],
    content: Callable[[StoredExtent | Buffer], Iterable[memoryview]],
    *,
    block_size: int = BLOCK_SIZE,
    half: int = -1,
    durable: bool = True,
    at: At = no_fault_hook,
) -> ShardReport:
    """Write a shard of `rows`; `content` makes the bytes of one when its turn comes.

    See `write_file` for `half` and for how long those bytes must stay.

    Raises:
        NoSpace, WriteFailed: the file system would not take it; the partial file is removed.
    """
    name = layout.shard_name(rank, world_size)
    pieces = chain.from_iterable(content(row) for row, _ in in_file_order(rows))
    opening = memoryview(shard_opening(rows, rank, world_size))
    size, crcs = write_file(
        directory / name, chain([opening], pieces), block_size, half=half, durable=durable, at=at
    )
    return ShardReport(
        rank=rank,
        world_size=world_size,
        file=name,
        size=size,
        block_size=block_size,
        crcs=crcs,
        extents=tuple(row for row, _ in rows if isinstance(row, StoredExtent)),
        buffers=tuple(row for row, _ in rows if isinstance(row, Buffer)),
    )


def in_file_order(rows: Iterable[StoredRow]) -> list[StoredRow]:
    """Return `rows` with larger elements first, so that each array is aligned to its own."""
    return sorted(rows, key=lambda row: -shard_header.DTYPES[row[0].dtype].itemsize)


def shard_opening(rows: Iterable[StoredRow], rank: int, world_size: int) -> bytes:
    """Return the bytes of a shard before its data."""
    fields = [(row.key, row.dtype, shape) for row, shape in in_file_order(rows)]
    return shard_header.encode(fields, {"format": FORMAT, "rank": str(rank), "world_size": str(world_size)})


def _row(entry: Entry | BufferEntry, file: str) -> StoredExtent | Buffer:
    if isinstance(entry, BufferEntry):
        dtype = _checked_dtype(f"buffer {entry.name!r}", entry.array, entry.dtype)
        return Buffer(entry.name, dtype, entry.array.shape, file)
    what, count = f"tensor {entry.tensor!r}, state {entry.state!r}", entry.array.size
    if not 0 <= entry.start < entry.stop or count != entry.stop - entry.start:
        raise Mismatch(f"{what}: got {counted(count, 'element')} for the range [{entry.start}, {entry.stop})")
    dtype = _checked_dtype(what, entry.array, entry.dtype)
    return StoredExtent.of(entry.tensor, entry.state, entry.start, entry.stop, dtype, file)


def _checked_dtype(what: str, array: npt.NDArray[Any], declared: str | None) -> str:
    """Return the dtype to store `array` in, once it is certain that its memory can be written as it is."""
    if not array.flags.c_contiguous:
        raise Mismatch(f"{what}: the array is not C-contiguous; hand in a contiguous one (nothing is copied here)")
    try:
        return shard_header.dtype_name(array.dtype, declared)
    except Mismatch as cause:
        raise Mismatch(f"{what}: {cause}") from None


def _bytes_of(array: npt.NDArray[Any]) -> memoryview:
    """Return the array's memory, one byte per element; no copy."""
    return array.reshape(-1).view("u1").data


def write_file(
    path: Path,
    pieces: Iterable[memoryview],
    block_size: int,
    *,
    half: int = -1,
    durable: bool = True,
    at: At = no_fault_hook,
) -> tuple[int, tuple[int, ...]]:
    """Write and sync a new file of `pieces`; returns its size in bytes and the CRC32 of each block.

    A piece's bytes must stay as they are until the block that holds its end is complete. Piece number `half`
    is where `at` is called for the half. What fails, here or in making the pieces, leaves no file.

    Raises:
        NoSpace, WriteFailed: the file system would not take it.
    """
    with writing(path):
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
        try:
            at("shard: created")
            blocks = _BlockWriter(descriptor, block_size, flush=durable)
            for index, piece in enumerate(pieces):
                if index == half:
                    at("shard: half written")
                blocks.write(piece)
            blocks.finish()
            at("shard: written")
            if durable:
                os.fsync(descriptor)
        except Exception:
            with suppress(OSError):
                path.unlink()
            raise
        finally:
            os.close(descriptor)
        at("shard: synced")
    return blocks.size, tuple(blocks.crcs)


class _BlockWriter:
    """Writes pieces one after another, and keeps the CRC32 of each block of the file."""

    def __init__(self, descriptor: int, block_size: int, *, flush: bool) -> None:
        self._descriptor = descriptor
        self._block_size = block_size
        self._flush = flush
        self._flushed = 0  # bytes that the kernel was asked to write out
        self._pending: list[memoryview] = []
        self._filled = 0  # bytes of the current block
        self._crc = 0  # of those bytes
        self.crcs: list[int] = []
        self.size = 0

    def write(self, piece: memoryview) -> None:
        """Append `piece`, whose bytes must stay as they are until the block that holds its end is written."""
        self.size += len(piece)
        while piece:
            chunk = piece[: self._block_size - self._filled]
            piece = piece[len(chunk) :]
            self._crc = crc32(chunk, self._crc)
            self._filled += len(chunk)
            self._pending.append(chunk)
            if self._filled == self._block_size:
                self._end_block()
            elif len(self._pending) == _MAX_PIECES:
                write_all(self._descriptor, self._pending)

    def finish(self) -> None:
        """Write what is left; the last block of a file may be short."""
        if self._filled:
            self._end_block()

    def _end_block(self) -> None:
        write_all(self._descriptor, self._pending)
        self.crcs.append(self._crc)
        self._filled = self._crc = 0
        if self._flush and self.size - self._flushed >= _FLUSH_BYTES:
            self._start_write_back()

    def _start_write_back(self) -> None:
        """Let the disk work while the rest is made; else all of it waits for the fsync.

        The advice that pages are not needed starts their write-back, and drops only those already clean.
        """
        os.posix_fadvise(self._descriptor, self._flushed, self.size - self._flushed, os.POSIX_FADV_DONTNEED)
        self._flushed = self.size
