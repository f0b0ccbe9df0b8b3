"""Reading a checkpoint, any part of it, at any world size.

A read names elements of a tensor's state in parameter space; whichever stored extents overlap it are found
by binary search and read with `pread`, checked block by block (blocks.py). So a rank of M reads what it
owns of a checkpoint of N with no gather, no whole tensor in memory, and no more bytes than its own plus two
blocks per extent it touches.

Cost: opening parses the manifest and stats each file (`check_files=False` leaves that to the first read of
each, so that a thousand ranks do not stat a thousand files each). A shard's header is read when the shard is
first touched. Memory: the manifest, headers seen, and one block for each of at most OPEN_FILES open shards.

Where a node keeps copies of shards (local_tier.py), `local` names their directory, and a whole copy is read
instead of its shard; the manifest is the same, so a copy that is not what was written is noticed, and passed over.

The directory is held open, so a checkpoint that is renamed while it is read stays the same one. It reads
what is asked, no more: damage elsewhere in the files is not looked for.
"""

from __future__ import annotations

import os
from bisect import bisect_right
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Collection
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self, TypeVar

from zslurm.checkpoint_tools.blocks import BlockFile, check_size
from zslurm.checkpoint_tools.errors import Damaged, Mismatch, NotACheckpoint, ReadFailed, read_failed
from zslurm.checkpoint_tools.format import layout, manifest_json, shard_header
from zslurm.checkpoint_tools.format.manifest import Manifest, ShardFile, StoredExtent, Tensor
from zslurm.checkpoint_tools.format.shard_header import DTYPES, LENGTH_BYTES, Span
from zslurm.checkpoint_tools.plain import StrPath
from zslurm.checkpoint_tools.quantities import counted, show_count

if TYPE_CHECKING:
    import numpy.typing as npt

_T = TypeVar("_T")

OPEN_FILES = 8
"""Shards that a checkpoint holds open at once; the one that was used longest ago is closed for the next."""


class Checkpoint:
    """An open checkpoint. Use it as a context manager; not for use from two threads at once.

    Attributes:
        path: where it was opened.
        manifest: what it holds; step, tokens, model, cursor and state are there.
        bytes, local_bytes: asked for so far, and how many of them came from local copies.
    """

    def __init__(self, path: Path, directory: int, manifest: Manifest, local: Path | None = None) -> None:
        """Use `Checkpoint.open`."""
        self.path = path
        self.local_bytes = self.bytes = 0
        self._local = local
        self._without_copy: set[str] = set()
        self._copies: set[str] = set()  # of the files that are open: those that are copies
        self.manifest = manifest
        self._directory = directory
        self._tensors = {tensor.name: tensor for tensor in manifest.tensors}
        self._buffers = {buffer.name: buffer for buffer in manifest.buffers}
        self._files = {file.name: file for file in manifest.files}
        self._open: OrderedDict[str, BlockFile] = OrderedDict()
        self._headers: dict[str, dict[str, Span]] = {}

    @classmethod
    def open(cls, path: StrPath, *, check_files: bool = True, local: StrPath | None = None) -> Self:
        """Open the checkpoint at `path`, with its manifest checked and, with `check_files`, each file's size.

        `local` is a directory of copies, see local_tier.py; it need not exist.

        Raises:
            NotACheckpoint: there is no directory or no manifest, so nothing was ever committed here.
            Damaged, Incomplete, VersionTooNew: see `manifest_json.decode`; Damaged also for a wrong file.
            ReadFailed: the operating system refused.
        """
        path = Path(path)
        try:
            directory = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        except (FileNotFoundError, NotADirectoryError):
            raise NotACheckpoint(f"{path} is not a directory, so not a checkpoint; check the path") from None
        except OSError as cause:
            raise read_failed(path, cause) from cause
        try:
            manifest = _read_manifest(path, directory)
            checkpoint = cls(path, directory, manifest, None if local is None else Path(local))
            if check_files:
                for file in checkpoint.manifest.files:
                    checkpoint._check_file(file)
        except BaseException:
            os.close(directory)
            raise
        return checkpoint

    def close(self) -> None:
        """Close every descriptor; the checkpoint cannot be read after that. A second call does nothing."""
        while self._open:
            self._open.popitem()[1].close()
        if self._directory >= 0:
            os.close(self._directory)
            self._directory = -1

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def __repr__(self) -> str:
        """Describe the checkpoint: where it is, which step, and how much is in it."""
        manifest, state = self.manifest, "" if self._directory >= 0 else ", closed"
        numbers = sum(tensor.numel for tensor in manifest.tensors)
        return (
            f"Checkpoint({str(self.path)!r}, step {manifest.step}, "
            f"{counted(manifest.tokens, 'token', shown=show_count(manifest.tokens))}, "
            f"{counted(len(self._tensors), 'tensor')} of {counted(numbers, 'number', shown=show_count(numbers))}, "
            f"{counted(len(self._buffers), 'buffer')}, written by {counted(manifest.world_size, 'rank')}{state})"
        )

    def names(self) -> list[str]:
        """Return the names of everything that `numpy` reads: the tensors in table order, then the buffers."""
        return [*self._tensors, *self._buffers]

    def numpy(self, name: str, state: str = "master") -> npt.NDArray[Any]:
        """Return a new array with a whole tensor, or a buffer, in its shape.

        numpy has no bfloat16: such values are widened to float32, which holds each of them exactly. Float8
        comes as its bits, in uint8.

        Args:
            name: one of `names()`.
            state: which of a tensor's states, such as `master` or `momentum`; a buffer has only itself.

        Raises:
            Mismatch: the checkpoint has no such tensor or state.
            Damaged, ReadFailed: as for `read`.
        """
        import numpy as np

        if name in self._buffers:
            values, dtype = self.read_buffer(name), self._buffers[name].dtype
        else:
            dtype = self.dtype(name, state)
            values = np.empty(self.shape(name), DTYPES[dtype])
            self.read(name, state, 0, values.size, values)
        return (values.astype(np.uint32) << 16).view(np.float32) if dtype == "BF16" else values

    def state_dict(self, state: str = "master") -> dict[str, npt.NDArray[Any]]:
        """Return one state of every tensor that has it, and every buffer, by name, as `numpy` reads them.

        All of it is in memory then. `{name: torch.from_numpy(array) for name, array in ...}` is torch's form.

        Raises:
            Mismatch: no tensor has such a state.
            Damaged, ReadFailed: as for `read`.
        """
        having = [name for name, tensor in self._tensors.items() if state in tensor.states]
        if self._tensors and not having:
            names = dict.fromkeys(names for tensor in self._tensors.values() for names in tensor.states)
            raise Mismatch(f"{self.path} has no state {state!r} of any tensor, only {', '.join(names)}")
        return {name: self.numpy(name, state) for name in [*having, *self._buffers]}

    @property
    def tensors(self) -> Collection[str]:
        """Return the names of the tensors, in table order."""
        return self._tensors.keys()

    @property
    def buffers(self) -> Collection[str]:
        """Return the names of the buffers."""
        return self._buffers.keys()

    def shape(self, tensor: str) -> tuple[int, ...]:
        """Shape of a tensor. Raises Mismatch if the checkpoint has none of that name."""
        return self._tensor(tensor).shape

    def dtype(self, tensor: str, state: str) -> str:
        """Dtype of a tensor's state ("F32", ...). Raises Mismatch if the checkpoint does not have it."""
        states = self._tensor(tensor).states
        if state not in states:
            kept = ", ".join(states) or "nothing"
            raise Mismatch(f"{self.path} has no state {state!r} of tensor {tensor!r}, only {kept}")
        return states[state]

    def read(self, tensor: str, state: str, start: int, stop: int, out: npt.NDArray[Any]) -> None:
        """Fill `out` with elements [start, stop), row-major, of a tensor's state.

        `out` is C-contiguous, has stop - start elements and the numpy dtype that carries the stored one
        (uint16 for BF16): nothing is converted.

        Raises:
            Mismatch: the checkpoint has no such elements, or `out` does not fit them.
            Damaged: a byte is not what was written; what `out` holds is then undefined.
            ReadFailed: the operating system refused.
        """
        dtype = self.dtype(tensor, state)
        numel = self._tensor(tensor).numel
        if not 0 <= start <= stop <= numel:
            raise Mismatch(f"tensor {tensor!r} has elements [0, {numel}), not [{start}, {stop})")
        if out.dtype != DTYPES[dtype] or out.size != stop - start or not out.flags.c_contiguous:
            raise Mismatch(
                f"tensor {tensor!r}, state {state!r}: reading [{start}, {stop}) needs a contiguous array of "
                f"{stop - start} {DTYPES[dtype]}, got {out.size} {out.dtype}"
            )
        view = out.reshape(-1)
        extents = self._extents[tensor, state]
        first = max(0, bisect_right(extents, start, key=lambda extent: extent.start) - 1)
        for index in range(first, len(extents)):
            extent = extents[index]
            if extent.start >= stop:
                break
            low, high = max(start, extent.start), min(stop, extent.stop)
            self._read_extent(extent, dtype, low, view[low - start : high - start])

    def read_buffer(self, name: str) -> npt.NDArray[Any]:
        """Return a new array with the buffer of that name, in its shape.

        Raises:
            Mismatch: the checkpoint has no such buffer.
            Damaged, ReadFailed: as for `read`.
        """
        import numpy as np

        buffer = self._buffers.get(name)
        if buffer is None:
            raise Mismatch(f"{self.path} has no buffer {name!r}")
        span = self._span(buffer.file, name, buffer.dtype, buffer.numel, name)
        out = np.empty(buffer.shape, DTYPES[buffer.dtype])
        self._read_bytes(buffer.file, span.begin, _bytes_of(out), name)
        return out

    @cached_property
    def _extents(self) -> dict[tuple[str, str], list[StoredExtent]]:
        """Extents of each state of each tensor, by start; the manifest was checked, so they tile it."""
        by_state: dict[tuple[str, str], list[StoredExtent]] = defaultdict(list)
        for extent in sorted(self.manifest.extents, key=lambda extent: extent.start):
            by_state[extent.tensor, extent.state].append(extent)
        return by_state

    def _tensor(self, name: str) -> Tensor:
        if name not in self._tensors:
            raise Mismatch(f"{self.path} has no tensor {name!r}; is it a checkpoint of this model?")
        return self._tensors[name]

    def _read_extent(self, extent: StoredExtent, dtype: str, start: int, out: npt.NDArray[Any]) -> None:
        """Fill `out` with elements of `extent`, from element `start` of its tensor on."""
        span = self._span(extent.file, extent.key, dtype, extent.stop - extent.start, extent.tensor)
        offset = span.begin + (start - extent.start) * out.itemsize
        self._read_bytes(extent.file, offset, _bytes_of(out), extent.tensor)

    def _read_bytes(self, name: str, offset: int, out: memoryview, tensor: str) -> None:
        """Fill `out` from byte `offset` of a file."""
        self._use(name, lambda file: file.read_into(offset, out, tensor))
        self.bytes += len(out)
        if name in self._copies:
            self.local_bytes += len(out)

    def _span(self, file: str, key: str, dtype: str, numel: int, tensor: str) -> Span:
        """Return the position of `key` in `file`, once the file's own header agrees with the manifest about it."""
        if file not in self._headers:
            self._headers[file] = self._use(file, lambda opened: read_header(opened, tensor))
        span = self._headers[file].get(key)
        if span is None or span.dtype != dtype or span.end - span.begin != numel * DTYPES[dtype].itemsize:
            raise Damaged(self.path / file, f"its header does not hold {numel} {dtype} under {key!r}", tensor)
        return span

    def _file(self, name: str) -> BlockFile:
        """Return the open file of that name, or its copy, among the OPEN_FILES used last."""
        if name in self._open:
            self._open.move_to_end(name)
        else:
            if len(self._open) == OPEN_FILES:
                closed, file = self._open.popitem(last=False)
                self._copies.discard(closed)
                file.close()
            self._open[name] = self._open_copy(name) or BlockFile(
                self.path / name, self._directory, self._files[name], self.manifest.block_size
            )
        return self._open[name]

    def _open_copy(self, name: str) -> BlockFile | None:
        if self._local is None or name in self._without_copy:
            return None
        path = self._local / layout.copy_name(self.manifest.step, name)
        try:
            copy = BlockFile(path, None, self._files[name], self.manifest.block_size)
        except (Damaged, ReadFailed):
            self._without_copy.add(name)
            return None
        self._copies.add(name)
        return copy

    def _use(self, name: str, read: Callable[[BlockFile], _T]) -> _T:
        """Read from the node's copy of a file if that is sound, else, from now on, from the shard itself."""
        try:
            return read(self._file(name))
        except (Damaged, ReadFailed):
            if name not in self._copies:
                raise
        self._without_copy.add(name)
        self._copies.discard(name)
        self._open.pop(name).close()
        return read(self._file(name))

    def _check_file(self, file: ShardFile) -> None:
        path = self.path / file.name
        try:
            check_size(path, file, os.stat(file.name, dir_fd=self._directory))
        except FileNotFoundError:
            raise Damaged(path, "the file is missing") from None
        except OSError as cause:
            raise read_failed(path, cause) from cause


def _read_manifest(path: Path, directory: int) -> Manifest:
    def without_waiting(name: str, flags: int) -> int:  # a FIFO would wait for a writer
        return os.open(name, flags | os.O_NONBLOCK, dir_fd=directory)

    try:
        with open(layout.MANIFEST, "rb", opener=without_waiting) as file:
            manifest_json.check_file(path / layout.MANIFEST, os.fstat(file.fileno()))
            data = file.read()
    except FileNotFoundError:
        raise NotACheckpoint(f"{path} has no {layout.MANIFEST}: it was never committed; use another one") from None
    except OSError as cause:
        raise read_failed(path / layout.MANIFEST, cause) from cause
    return manifest_json.decode(data, path / layout.MANIFEST)


@manifest_json.gc_disabled()
def read_header(file: BlockFile, tensor: str | None = None) -> dict[str, Span]:
    """Return the position of each key of a shard; `tensor` is named in errors.

    Raises:
        Damaged, ReadFailed: as `BlockFile.read_into`.
    """
    opening = bytearray(min(LENGTH_BYTES, file.size))
    file.read_into(0, memoryview(opening), tensor)
    if (
        len(opening) < LENGTH_BYTES
        or (length := shard_header.decode_length(bytes(opening))) > file.size - LENGTH_BYTES
    ):
        raise Damaged(file.path, "it is too short for a safetensors file", tensor)
    if length > shard_header.MOST_BYTES:
        raise Damaged(
            file.path, f"its header has {counted(length, 'byte')}, more than any safetensors file", tensor
        )
    header = bytearray(length)
    file.read_into(LENGTH_BYTES, memoryview(header), tensor)
    try:
        return shard_header.decode(bytes(header))
    except ValueError as cause:
        raise Damaged(file.path, str(cause), tensor) from cause


def _bytes_of(array: npt.NDArray[Any]) -> memoryview:
    return array.reshape(-1).view("u1").data
