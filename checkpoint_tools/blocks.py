"""A file read block by block, each block checked against its CRC32 before a byte of it is used.

A request is cut at block boundaries. Blocks that it covers whole are read straight into the caller's memory
and checked there; at its ends, the block is read into a separate buffer, checked, and the part wanted is
copied. The last such block is kept, so neighbours that share one cost one read: a file read from front to
back in any pieces is read once.

Cost: one `preadv` and one CRC pass per block touched, and one block of memory. The price of checking is
the smallest read is a block. The kernel is asked to read ahead, and given notice of what a long request needs:
it reads on while a block is checked. Nothing is retried or repaired.
"""

from __future__ import annotations

import os
import stat
from pathlib import Path

from zslurm.checkpoint_tools.checksum import crc32
from zslurm.checkpoint_tools.errors import Damaged, read_failed
from zslurm.checkpoint_tools.format.manifest import ShardFile
from zslurm.checkpoint_tools.quantities import counted


class BlockFile:
    """An open file of a checkpoint; not for use from two threads at once."""

    def __init__(self, path: Path, directory: int | None, file: ShardFile, block_size: int) -> None:
        """Open `path`, or its name in the directory of descriptor `directory`; `file` is its row in the manifest.

        Raises:
            Damaged: the file is missing, is no regular file, or has another size than in the manifest.
            ReadFailed: the operating system refused.
        """
        self.path = path
        self.size = file.size
        self._crcs = file.crcs
        self._block_size = block_size
        self._cached = -1  # number of the block in _cache
        self._cache = bytearray()
        try:
            where = path if directory is None else path.name
            self._descriptor = os.open(where, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK, dir_fd=directory)
        except FileNotFoundError:
            raise Damaged(path, "the file is missing") from None
        except OSError as cause:
            raise read_failed(path, cause) from cause
        try:
            check_size(path, file, os.fstat(self._descriptor))
            os.posix_fadvise(self._descriptor, 0, 0, os.POSIX_FADV_SEQUENTIAL)
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Close the descriptor and free the cached block."""
        os.close(self._descriptor)
        self._cached, self._cache = -1, bytearray()

    def read_into(self, offset: int, out: memoryview, tensor: str | None = None) -> None:
        """Fill `out` (bytes) from `offset` bytes into the file on; `tensor` is named in errors.

        Raises:
            Damaged: a checksum does not match, or the file ends early. What `out` holds then is undefined.
            ReadFailed: the operating system refused.
        """
        if len(out) > self._block_size:
            os.posix_fadvise(self._descriptor, offset, len(out), os.POSIX_FADV_WILLNEED)
        done = 0
        while done < len(out):
            block, inside = divmod(offset + done, self._block_size)
            begin, end = self._bounds(block)
            if begin + inside >= end:
                raise Damaged(self.path, f"it ends before byte {offset + len(out)}", tensor)
            target = out[done : done + (end - begin - inside)]
            if len(target) == end - begin and block != self._cached:
                self._read_block(block, target, tensor)
            else:
                target[:] = self._block(block, tensor)[inside : inside + len(target)]
            done += len(target)

    def _bounds(self, block: int) -> tuple[int, int]:
        return block * self._block_size, min((block + 1) * self._block_size, self.size)

    def _block(self, block: int, tensor: str | None) -> memoryview:
        if block != self._cached:
            begin, end = self._bounds(block)
            self._cached = -1
            if len(self._cache) < end - begin:
                self._cache = bytearray(end - begin)
            self._read_block(block, memoryview(self._cache)[: end - begin], tensor)
            self._cached = block
        return memoryview(self._cache)

    def _read_block(self, block: int, out: memoryview, tensor: str | None) -> None:
        begin, done = block * self._block_size, 0
        while done < len(out):
            try:
                count = os.preadv(self._descriptor, [out[done:]], begin + done)
            except OSError as cause:
                raise read_failed(self.path, cause) from cause
            if count == 0:
                raise Damaged(
                    self.path,
                    f"it ends after {counted(begin + done, 'byte')} instead of {self.size}",
                    tensor,
                    block,
                )
            done += count
        if crc32(out) != self._crcs[block]:
            where = f"block {block} (bytes {begin} to {begin + len(out)}) does not match its checksum"
            raise Damaged(self.path, where, tensor, block)


def check_size(path: Path, file: ShardFile, found: os.stat_result) -> None:
    """Check that `found`, of the file at `path`, is a regular file of the size that the manifest gives `file`.

    Raises:
        Damaged: it is not.
    """
    if not stat.S_ISREG(found.st_mode):
        raise Damaged(path, "it is not a regular file")
    if found.st_size != file.size:
        raise Damaged(path, f"it has {counted(found.st_size, 'byte')} instead of {file.size}")
