"""Source files as streams of bytes, decompressed if their name ends in .gz or .zst.

Memory is bounded by the buffers, whatever the size of the file. A compressed file that ends too early is an
error, never a shorter file.
"""

from __future__ import annotations

import gzip
import io
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from typing import IO, Any, cast

from zslurm.train.data.build.sources import SourceFile
from zslurm.train.errors import DataError

BUFFER_BYTES = 1 << 20
COMPRESSED_CHUNK = 16 << 10  # what one call of zstd decompresses at most


class _Truncated(OSError):
    """The compressed data end before their end."""


@contextmanager
def open_source(file: SourceFile) -> Iterator[tuple[IO[bytes], IO[bytes]]]:
    """Yield the stream of a file's bytes, decompressed, and the file itself, whose position is the progress.

    Raises:
        DataError: it cannot be read, now or in the body, is damaged or truncated, or zstandard is not installed.
    """
    try:
        with file.path.open("rb", buffering=BUFFER_BYTES) as raw:
            yield _decompressed(file, raw), raw
    except EOFError as error:
        raise DataError(f"{file.path}: is truncated: {error}; copy it again") from error
    except (gzip.BadGzipFile, zlib.error, _Truncated) as error:
        raise DataError(f"{file.path}: is damaged: {error}; copy it again") from error
    except OSError as error:
        raise DataError(f"{file.path}: cannot be read: {error.strerror or error}") from error


def skip(stream: IO[bytes], count: int) -> None:
    """Go `count` bytes forward: at once if the stream can seek, by reading if it is compressed."""
    if isinstance(stream, io.BufferedReader) and isinstance(stream.raw, io.FileIO):
        stream.seek(count, io.SEEK_CUR)
        return
    while count > 0 and (read := stream.read(min(count, BUFFER_BYTES))):
        count -= len(read)


def _decompressed(file: SourceFile, raw: IO[bytes]) -> IO[bytes]:
    if file.compression == ".gz":
        return io.BufferedReader(cast(io.RawIOBase, gzip.GzipFile(fileobj=raw)), BUFFER_BYTES)
    if file.compression == ".zst":
        return io.BufferedReader(_ZstdReader(file, raw), BUFFER_BYTES)
    return raw


class _ZstdReader(io.RawIOBase):
    """Frame after frame of zstd data. The library's own stream reader does not notice a missing end."""

    def __init__(self, file: SourceFile, raw: IO[bytes]) -> None:
        try:
            import zstandard
        except ImportError:
            raise DataError(
                f"{file.path}: reading .zst needs the package zstandard: pip install 'zslurm-train[data]'"
            ) from None
        self._raw = raw
        self._error = zstandard.ZstdError
        self._decompressor = zstandard.ZstdDecompressor(max_window_size=1 << 31)
        self._frame: Any = None
        self._ready = memoryview(b"")

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        into = memoryview(buffer)
        while not self._ready:
            ended = self._frame is not None and self._frame.eof
            chunk = (self._frame.unused_data if ended else b"") or self._raw.read(COMPRESSED_CHUNK)
            if not chunk and self._frame is not None and not ended:
                raise _Truncated("the last frame is not complete")
            if not chunk:
                return 0
            if self._frame is None or ended:
                self._frame = self._decompressor.decompressobj()
            try:
                self._ready = memoryview(self._frame.decompress(chunk))
            except self._error as error:
                raise _Truncated(str(error)) from error
        taken = min(len(into), len(self._ready))
        into[:taken] = self._ready[:taken]
        self._ready = self._ready[taken:]
        return taken
