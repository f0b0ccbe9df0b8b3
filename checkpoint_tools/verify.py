"""Looking for damage: every byte of a checkpoint is read once and compared with its checksum.

Reading and CRC32 release the GIL, so a few threads keep up with the disk; each has a buffer of one block.
Runs of blocks are handed out in the order of the files. All that is wrong is found, not only the first of it:
a flipped bit is one block of one file, and the tensors that have elements in it are named from the file's own
header, where that is whole. A flip in the manifest is found by the manifest's own checksum, and then nothing
else can be known.

Cost: the checkpoint's bytes once, and one block of memory per thread. Nothing is written, nothing repaired.
Files that the manifest does not name are not looked at: nothing reads them.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from threading import Lock

from zslurm.checkpoint_tools import layout, manifest_json, shard_header
from zslurm.checkpoint_tools.blocks import check_size
from zslurm.checkpoint_tools.checksum import crc32
from zslurm.checkpoint_tools.errors import Damaged, Incomplete, NotACheckpoint, read_failed
from zslurm.checkpoint_tools.manifest import Manifest, ShardFile
from zslurm.checkpoint_tools.shard_header import LENGTH_BYTES

RUN_BYTES = 64 << 20
"""Bytes that one thread takes at a time."""

Report = Callable[[int, int], None]
"""Gets bytes done and bytes in all."""


@dataclass(frozen=True, slots=True)
class Damage:
    """One thing that is wrong.

    Attributes:
        file: name of the file inside the checkpoint.
        reason: what is wrong, in a few words.
        block: number of the damaged block; None where it is not that local.
        tensors: keys with elements in that block (`tensor:state[start:stop]`, or a buffer's name); none where
            the file's header is damaged.
    """

    file: str
    reason: str
    block: int | None = None
    tensors: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Verification:
    """What `verify` found: all of `damages` in order of files and blocks, and the bytes it read."""

    path: Path
    files: int
    bytes: int
    damages: tuple[Damage, ...]

    @property
    def sound(self) -> bool:
        """Return whether every byte is what was written."""
        return not self.damages


def verify(path: Path, *, threads: int = 2, report: Report = lambda done, total: None) -> Verification:
    """Read the whole checkpoint at `path` and say what is damaged.

    Args:
        path: directory of a committed checkpoint.
        threads: readers at once.
        report: called now and then, by one thread at a time.

    Raises:
        NotACheckpoint: nothing was ever committed here.
        VersionTooNew: a newer version wrote it.
        ReadFailed: the operating system refused (that is no damage).
    """
    try:
        manifest, size = _read_manifest(path)
    except (Damaged, Incomplete) as error:
        reason = error.reason if isinstance(error, Damaged) else str(error)
        return Verification(path, 1, 0, (Damage(layout.MANIFEST, reason),))
    lock, done, total = Lock(), size, size + sum(file.size for file in manifest.files)

    def add(count: int) -> None:
        nonlocal done
        with lock:
            done += count
            report(done, total)

    with ThreadPoolExecutor(max(1, threads), thread_name_prefix="verify") as pool:
        found = pool.map(lambda run: run.check(path, manifest.block_size, add), _runs(manifest))
        damages = tuple(damage for damages in found for damage in damages)
    return Verification(path, 1 + len(manifest.files), done, damages)


def _read_manifest(path: Path) -> tuple[Manifest, int]:
    place = path / layout.MANIFEST
    try:
        data = place.read_bytes()
    except (FileNotFoundError, NotADirectoryError):
        raise NotACheckpoint(f"{path} has no {layout.MANIFEST}, so it is no checkpoint; check the path") from None
    except OSError as cause:
        raise read_failed(place, cause) from cause
    return manifest_json.decode(data, place), len(data)


def _runs(manifest: Manifest) -> Iterator[_Run]:
    length = max(1, RUN_BYTES // manifest.block_size)
    for file in manifest.files:
        for first in range(0, max(1, len(file.crcs)), length):
            yield _Run(file, first, min(first + length, len(file.crcs)))


@dataclass(frozen=True, slots=True)
class _Run:
    """Blocks [first, stop) of a file. The first run of a file that is wrong from outside says so for all."""

    file: ShardFile
    first: int
    stop: int

    def check(self, path: Path, block_size: int, add: Callable[[int], None]) -> list[Damage]:
        """Read the blocks, each into the same buffer, and say what is wrong with them."""
        place = path / self.file.name
        try:
            with open(place, "rb", buffering=0, opener=_without_waiting) as opened:
                descriptor = opened.fileno()
                check_size(place, self.file, os.fstat(descriptor))
                os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_SEQUENTIAL)
                bad = list(self._damaged_blocks(descriptor, block_size, add))
                spans = _spans(descriptor, self.file, block_size) if bad else {}
        except FileNotFoundError:
            return [Damage(self.file.name, "the file is missing")] if self.first == 0 else []
        except Damaged as damage:
            return [Damage(self.file.name, damage.reason)] if self.first == 0 else []
        except OSError as cause:
            raise read_failed(place, cause) from cause
        return [_damage(self.file, block, block_size, spans) for block in bad]

    def _damaged_blocks(self, descriptor: int, block_size: int, add: Callable[[int], None]) -> Iterator[int]:
        buffer = memoryview(bytearray(min(block_size, self.file.size)))
        for block in range(self.first, self.stop):
            begin, end = _bounds(self.file, block, block_size)
            view = buffer[: end - begin]
            if _read(descriptor, begin, view) != len(view) or crc32(view) != self.file.crcs[block]:
                yield block
            add(len(view))


def _without_waiting(path: str, flags: int) -> int:
    """Open a file that may turn out to be a pipe."""
    return os.open(path, flags | os.O_NONBLOCK | os.O_CLOEXEC)


def _bounds(file: ShardFile, block: int, block_size: int) -> tuple[int, int]:
    return block * block_size, min((block + 1) * block_size, file.size)


def _read(descriptor: int, begin: int, view: memoryview) -> int:
    """Fill `view` from byte `begin` on; returns the bytes read, fewer where the file ends."""
    done = 0
    while done < len(view) and (count := os.preadv(descriptor, [view[done:]], begin + done)):
        done += count
    return done


def _spans(descriptor: int, file: ShardFile, block_size: int) -> dict[str, shard_header.Span]:
    """Return where each key lies, if the blocks of the file's header are whole; else nothing."""
    opening = memoryview(bytearray(LENGTH_BYTES))
    if _read(descriptor, 0, opening) != LENGTH_BYTES:
        return {}
    data = LENGTH_BYTES + shard_header.decode_length(bytes(opening))
    if data > file.size:
        return {}
    blocks = range(-(-data // block_size))
    header = memoryview(bytearray(min(len(blocks) * block_size, file.size)))
    _read(descriptor, 0, header)
    for block in blocks:
        begin, end = _bounds(file, block, block_size)
        if crc32(header[begin:end]) != file.crcs[block]:
            return {}
    return shard_header.decode(bytes(header[LENGTH_BYTES:data]))


def _damage(file: ShardFile, block: int, block_size: int, spans: dict[str, shard_header.Span]) -> Damage:
    begin, end = _bounds(file, block, block_size)
    keys = tuple(key for key, span in spans.items() if span.begin < end and span.end > begin)
    return Damage(file.name, f"bytes {begin} to {end} do not match their checksum", block, keys)
