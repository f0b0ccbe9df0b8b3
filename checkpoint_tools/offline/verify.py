"""Looking for damage: every byte of a checkpoint is read once and compared with its checksum.

Reading and CRC32 release the GIL, so a few threads keep up with the disk; each has a buffer of one block.
Runs of blocks are handed out in the order of the files. All that is wrong is found, not only the first of it:
a flipped bit is one block of one file, and the tensors that have elements in it are named from the file's own
header, if that is whole. A flip in the manifest is found by the manifest's own checksum, and then nothing
else can be known.

Cost: the checkpoint's bytes once, and one block of memory per thread. Nothing is written, nothing repaired.
Files that the manifest does not name are not looked at: nothing reads them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, suppress
from dataclasses import dataclass
from pathlib import Path
from threading import Lock

from zslurm.checkpoint_tools.blocks import BlockFile
from zslurm.checkpoint_tools.errors import Damaged, Incomplete
from zslurm.checkpoint_tools.format import layout
from zslurm.checkpoint_tools.format.manifest import Manifest, ShardFile
from zslurm.checkpoint_tools.format.shard_header import Span
from zslurm.checkpoint_tools.plain import StrPath
from zslurm.checkpoint_tools.read import Checkpoint, read_header

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
        block: number of the damaged block; None if it is not that local.
        tensors: keys with elements in that block (`tensor:state[start:stop]`, or a buffer's name); none if
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


def verify(path: StrPath, *, threads: int = 2, report: Report = lambda done, total: None) -> Verification:
    """Read the whole checkpoint at `path` and return what is damaged; `report` is called by one thread at a time.

    Raises:
        NotACheckpoint: nothing was ever committed here.
        VersionTooNew: a newer version wrote it.
        ReadFailed: the operating system refused (that is no damage).
    """
    path = Path(path)
    try:
        with Checkpoint.open(path, check_files=False) as checkpoint:
            manifest = checkpoint.manifest
        size = (path / layout.MANIFEST).stat().st_size
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
        damages_by_run = pool.map(lambda run: run.check(path, manifest.block_size, add), _runs(manifest))
        damages = tuple(damage for damages in damages_by_run for damage in damages)
    return Verification(path, 1 + len(manifest.files), done, damages)


def _runs(manifest: Manifest) -> Iterator[_Run]:
    length = max(1, RUN_BYTES // manifest.block_size)
    for file in manifest.files:
        for first in range(0, max(1, len(file.crcs)), length):
            yield _Run(file, first, min(first + length, len(file.crcs)))


@dataclass(frozen=True, slots=True)
class _Run:
    """Blocks [first, stop) of a file. The first run of a file that is wrong from outside reports it for all."""

    file: ShardFile
    first: int
    stop: int

    def check(self, path: Path, block_size: int, add: Callable[[int], None]) -> list[Damage]:
        """Read the blocks, each into the same buffer, and return what is wrong with them."""
        try:
            opened = BlockFile(path / self.file.name, None, self.file, block_size)
        except Damaged as damage:
            return [Damage(self.file.name, damage.reason)] if self.first == 0 else []
        with closing(opened):
            damaged = list(self._damaged_blocks(opened, block_size, add))
            spans: dict[str, Span] = {}
            if damaged:
                with suppress(Damaged):
                    spans = read_header(opened)
        return [
            Damage(
                self.file.name,
                f"bytes {begin} to {end} do not match their checksum",
                block,
                tuple(key for key, span in spans.items() if span.begin < end and span.end > begin),
            )
            for block, begin, end in damaged
        ]

    def _damaged_blocks(
        self, file: BlockFile, block_size: int, add: Callable[[int], None]
    ) -> Iterator[tuple[int, int, int]]:
        buffer = memoryview(bytearray(min(block_size, self.file.size)))
        for block in range(self.first, self.stop):
            begin, end = block * block_size, min((block + 1) * block_size, self.file.size)
            try:
                file.read_into(begin, buffer[: end - begin])
            except Damaged:
                yield block, begin, end
            add(end - begin)
