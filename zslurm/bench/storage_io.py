"""Read and write a file past the page cache: the plain functions of `bench storage`, without torch.

Reads and writes are direct (O_DIRECT) if the file system has that. Elsewhere the file is put out of the page
cache before it is read, each block is read once, and the kernel is asked for no read-ahead: reads then go through
the cache, but not to it.
"""

from __future__ import annotations

import fcntl
import itertools
import mmap
import os
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from zslurm.checkpoint_tools.quantities import counted

LARGE = 4 << 20
"""Bytes of a sequential read or write."""
WINDOWS = 10
"""Parts of equal length into which a measurement is divided, to know how much its rate varies."""
_MOST_PLACES = 1 << 22
_ALIGNMENT = 4096


@dataclass(frozen=True)
class StorageRun:
    """What one rank did.

    Attributes:
        operations: how many.
        elapsed: seconds that they took together.
        median: seconds of one.
        p99: seconds within which 99 % of them were done.
        windows: operations in each window.
    """

    operations: int
    elapsed: float
    median: float
    p99: float
    windows: list[float] = field(default_factory=list)


class ScratchFile:
    """A file without a name: it is gone once this process closes it or dies, however it dies."""

    def __init__(self, directory: Path, name: str, size: int) -> None:
        """Make it, empty.

        Raises:
            OSError: the file system refused.
        """
        path = directory / name
        self.size = size
        self.descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        try:
            path.unlink()
            self.is_direct = self._become_direct()
        except BaseException:
            os.close(self.descriptor)
            raise

    def _become_direct(self) -> bool:
        """Turn O_DIRECT on, if a trial write shows that it works (some file systems take the flag only)."""
        flags = fcntl.fcntl(self.descriptor, fcntl.F_GETFL)
        try:
            fcntl.fcntl(self.descriptor, fcntl.F_SETFL, flags | os.O_DIRECT)
            with mmap.mmap(-1, _ALIGNMENT) as block:
                os.pwritev(self.descriptor, [block], 0)
        except OSError:
            fcntl.fcntl(self.descriptor, fcntl.F_SETFL, flags)
            return False
        return True

    def close(self) -> None:
        """Free its space."""
        os.close(self.descriptor)

    def write(self) -> StorageRun:
        """Write the whole file from its start and sync it: with bytes that neither compress nor repeat.

        Raises:
            OSError: the file system refused; ENOSPC if it is full.
        """
        block = mmap.mmap(-1, LARGE)  # page-aligned, as direct writes must be; freed with the last view of it
        block[:] = os.urandom(LARGE)
        stamps = np.frombuffer(block, np.uint64)
        durations = []
        began = time.perf_counter()
        for offset in range(0, self.size, LARGE):
            stamps[:: _ALIGNMENT // 8] += np.uint64(offset + 1)
            remaining = self.size - offset
            at = time.perf_counter()
            _whole(os.pwritev(self.descriptor, [memoryview(block)[:remaining]], offset), LARGE, remaining)
            durations.append(time.perf_counter() - at)
        os.fsync(self.descriptor)
        elapsed = time.perf_counter() - began
        # What a buffered write takes is no measure of the storage: only the whole is, with its fsync.
        return _measured(np.array(durations), elapsed, windows=self.is_direct)

    def read(self) -> StorageRun:
        """Read the whole file in order."""
        self._forget(os.POSIX_FADV_SEQUENTIAL)
        durations = []
        with mmap.mmap(-1, LARGE) as block:
            began = time.perf_counter()
            for offset in range(0, self.size, LARGE):
                at = time.perf_counter()
                _whole(os.preadv(self.descriptor, [block], offset), LARGE, self.size - offset)
                durations.append(time.perf_counter() - at)
            elapsed = time.perf_counter() - began
        return _measured(np.array(durations), elapsed)

    def read_randomly(self, depth: int, seconds: float, block_bytes: int) -> StorageRun:
        """Read blocks in random order for some seconds, `depth` of them at a time, each by a thread.

        Raises:
            OSError: a read failed.
        """
        self._forget(os.POSIX_FADV_RANDOM)
        places = _places(self.size // block_bytes)
        turns, lock = itertools.count(), threading.Lock()
        starts: list[list[float]] = [[] for _ in range(depth)]
        ends: list[list[float]] = [[] for _ in range(depth)]
        problems: list[OSError] = []
        ready = threading.Barrier(depth + 1)

        def work(thread: int) -> None:
            with mmap.mmap(-1, block_bytes) as block:
                ready.wait()
                deadline = time.perf_counter() + seconds
                at = 0.0
                while at < deadline and not problems:
                    turn = next(turns)
                    if turn and turn % len(places) == 0 and not self.is_direct:
                        with lock:  # each block was read once: put all of them out again
                            self._forget(os.POSIX_FADV_RANDOM)
                    offset = int(places[turn % len(places)]) * block_bytes
                    at = time.perf_counter()
                    try:
                        _whole(os.preadv(self.descriptor, [block], offset), block_bytes, block_bytes)
                    except OSError as error:
                        problems.append(error)
                        return
                    starts[thread].append(at)
                    ends[thread].append(time.perf_counter())

        threads = [threading.Thread(target=work, args=(thread,), daemon=True) for thread in range(depth)]
        for thread in threads:
            thread.start()
        ready.wait()
        began = time.perf_counter()
        for thread in threads:
            thread.join()
        if problems:
            raise problems[0]
        done = np.concatenate([np.array(moments) for moments in ends])
        durations = done - np.concatenate([np.array(moments) for moments in starts])
        elapsed = float(done.max()) - began
        counts, _ = np.histogram(done - began, bins=WINDOWS, range=(0, elapsed))
        return StorageRun(
            len(done), elapsed, float(np.median(durations)), float(np.quantile(durations, 0.99)), counts.tolist()
        )

    def _forget(self, advice: int) -> None:
        """Drop the file from the page cache, so that reads do not use it."""
        if not self.is_direct:
            os.posix_fadvise(self.descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
            os.posix_fadvise(self.descriptor, 0, 0, advice)


def _whole(done: int, block: int, left: int) -> None:
    """Check that a read or write was not short.

    Raises:
        OSError: it was.
    """
    if done < min(block, left):
        raise OSError(5, f"{done} of {counted(min(block, left), 'byte')} were transferred at once")


def _places(blocks: int) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
    """Return blocks in random order; of very many only some, and then one may come twice."""
    generator = np.random.default_rng()
    return generator.permutation(blocks) if blocks <= _MOST_PLACES else generator.integers(0, blocks, _MOST_PLACES)


def _measured(
    durations: np.ndarray[tuple[int], np.dtype[np.float64]], elapsed: float, *, windows: bool = True
) -> StorageRun:
    """Return operations that came one after the other; windows of equally many of them, as rates of one each."""
    parts = np.array_split(durations, min(WINDOWS, len(durations))) if windows else []
    return StorageRun(
        len(durations),
        elapsed,
        float(np.median(durations)),
        float(np.quantile(durations, 0.99)),
        [len(chunk) / float(chunk.sum()) for chunk in parts],
    )


def read_bytes() -> int | None:
    """Return the bytes that this process has had the storage read so far; None if the kernel does not count.

    `read_bytes` of /proc/PID/io (proc(5)): what a block device, or NFS, was asked for. Others may not count.
    """
    try:
        fields = dict(line.split(":") for line in Path("/proc/self/io").read_text().splitlines())
        return int(fields["read_bytes"])
    except (OSError, ValueError, KeyError):
        return None


def create_files(directory: Path, count: int) -> StorageRun:
    """Create empty files.

    Raises:
        OSError: the file system refused.
    """
    return _each(
        count, lambda name: os.close(os.open(directory / name, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600))
    )


def stat_files(directory: Path, count: int) -> StorageRun:
    """Ask for the size and times of each file."""
    return _each(count, lambda name: (directory / name).stat())


def unlink_files(directory: Path, count: int) -> StorageRun:
    """Remove each file."""
    return _each(count, lambda name: (directory / name).unlink())


def list_files(directory: Path, count: int) -> StorageRun:
    """List the directory once; an operation is one name.

    Raises:
        OSError: it cannot be listed, or shows another number of files.
    """
    began = time.perf_counter()
    with os.scandir(directory) as entries:
        counted_files = sum(1 for _ in entries)
    elapsed = time.perf_counter() - began
    if counted_files != count:
        raise OSError(5, f"{directory} shows {counted_files} of {counted(count, 'file')}")
    return StorageRun(count, elapsed, elapsed / count, elapsed / count)


def _each(count: int, action: Callable[[str], object]) -> StorageRun:
    durations = np.empty(count)
    began = time.perf_counter()
    for index in range(count):
        at = time.perf_counter()
        action(f"{index:08d}")
        durations[index] = time.perf_counter() - at
    return _measured(durations, time.perf_counter() - began)
