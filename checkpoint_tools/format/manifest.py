"""What a checkpoint holds, as data: tensors, buffers, files, and the position of each extent.

`Manifest.check` is the rule that makes a checkpoint whole: each element of each state of each tensor is in
exactly one extent, and the tables agree with each other. Writers run it before they commit, readers before
they read.

Cost: a sort of the extents, so a fraction of a second for 1,024 ranks and 5,000 tensors. How a manifest
looks on disk is in manifest_json.py; no file is opened here.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from zslurm.checkpoint_tools.errors import Incomplete
from zslurm.checkpoint_tools.format import layout
from zslurm.checkpoint_tools.format.shard_header import DTYPES
from zslurm.checkpoint_tools.quantities import counted

BLOCK_SIZE = 4 << 20
"""Bytes that one checksum covers, unless the writer chooses otherwise."""
MOST_BLOCK_SIZE = 1 << 30
"""A reader keeps a block in memory."""


@dataclass(frozen=True, slots=True)
class Tensor:
    """A row of the tensor table.

    `states` names what is kept of it ("master", ...) and the dtype of each. `whole` is the number of matrices that
    one rank each must own whole, 0 for a flat tensor: `partition` takes the row as it is, so who owned what, and
    who will at another world size, can be computed from a manifest and nothing else.
    """

    name: str
    shape: tuple[int, ...]
    states: Mapping[str, str]
    whole: int = 0

    @property
    def numel(self) -> int:
        """Return the elements of the tensor."""
        return math.prod(self.shape)


@dataclass(frozen=True, slots=True)
class Buffer:
    """A small array that one rank wrote whole, under its own name as key (balancing bias, RNG state)."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    file: str

    @property
    def key(self) -> str:
        """Return its key in the file."""
        return self.name

    @property
    def numel(self) -> int:
        """Return the elements of the buffer."""
        return math.prod(self.shape)


@dataclass(frozen=True, slots=True)
class ShardFile:
    """A file of the checkpoint: bytes, and the CRC32 of each block of the manifest's block size."""

    name: str
    size: int
    crcs: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class StoredExtent:
    """Elements [start, stop) of a tensor's state, row-major, stored as `dtype` in `file` under `key`."""

    tensor: str
    state: str
    start: int
    stop: int
    dtype: str
    file: str
    key: str

    @classmethod
    def of(cls, tensor: str, state: str, start: int, stop: int, dtype: str, file: str) -> StoredExtent:
        """Return an extent under the key that we write."""
        return cls(tensor, state, start, stop, dtype, file, layout.extent_key(tensor, state, start, stop))

    @property
    def numel(self) -> int:
        """Return the elements of the extent."""
        return self.stop - self.start


@dataclass(frozen=True, slots=True)
class Manifest:
    """All that is known of a checkpoint without its shards. `model`, `cursor` and `state` are plain JSON."""

    step: int
    tokens: int
    world_size: int
    model: Mapping[str, Any]
    cursor: Mapping[str, Any]
    state: Mapping[str, Any]
    block_size: int
    tensors: tuple[Tensor, ...]
    buffers: tuple[Buffer, ...]
    files: tuple[ShardFile, ...]
    extents: tuple[StoredExtent, ...]

    def check(self) -> None:
        """Check that tables agree and every element of every state is in exactly one extent, in its dtype.

        O(E log E) for E extents.

        Raises:
            Incomplete: they do not; the message names the first tensor, or file, concerned.
        """
        _check_files(self.files, self.block_size)
        files = {file.name for file in self.files}
        for buffer in _distinct(self.buffers, "buffer"):
            if buffer.file not in files or buffer.dtype not in DTYPES:
                raise Incomplete(f"buffer {buffer.name!r} is in no file of the checkpoint, or has no known dtype")
        for extent in self.extents:
            if extent.file not in files:
                raise Incomplete(f"tensor {extent.tensor!r} is said to be in {extent.file!r}, which is no file")
        _check_coverage(self.tensors, self.extents)
        self._check_room()

    def _check_room(self) -> None:
        """Check that each file is as large as its content is said to be: a reader reserves memory for it."""
        needed: dict[str, int] = defaultdict(int)
        pieces: tuple[StoredExtent | Buffer, ...] = (*self.extents, *self.buffers)
        for piece in pieces:
            needed[piece.file] += piece.numel * DTYPES[piece.dtype].itemsize
        for file in self.files:
            if needed[file.name] > file.size:
                raise Incomplete(
                    f"{file.name} has {counted(file.size, 'byte')}, and what it is said to hold has "
                    f"{needed[file.name]}"
                )


def _check_files(files: Iterable[ShardFile], block_size: int) -> None:
    if not 1 <= block_size <= MOST_BLOCK_SIZE:
        raise Incomplete(f"a block must have 1 to {MOST_BLOCK_SIZE} bytes, got {block_size}")
    for file in _distinct(files, "file"):
        if not layout.is_plain(file.name):
            raise Incomplete(f"{file.name!r} is not a plain file name; it will not be opened")
        if len(file.crcs) != -(-file.size // block_size):
            raise Incomplete(
                f"{file.name} has {counted(file.size, 'byte')} and {counted(len(file.crcs), 'checksum')}; they "
                "do not fit"
            )


def _check_coverage(tensors: Iterable[Tensor], extents: Iterable[StoredExtent]) -> None:
    stored: dict[tuple[str, str], list[StoredExtent]] = defaultdict(list)
    for extent in extents:
        stored[extent.tensor, extent.state].append(extent)
    for tensor in _distinct(tensors, "tensor"):
        if unknown := set(tensor.states.values()) - DTYPES.keys():
            raise Incomplete(f"tensor {tensor.name!r} has unknown dtypes: {', '.join(sorted(unknown))}")
        for state, dtype in tensor.states.items():
            what = f"tensor {tensor.name!r}, state {state!r}"
            pieces = sorted(stored.pop((tensor.name, state), ()), key=lambda extent: extent.start)
            for piece in pieces:
                if piece.dtype != dtype:
                    raise Incomplete(
                        f"{piece.file}: {what} was written as {piece.dtype}, the tensor table says {dtype}"
                    )
            _check_exact(what, pieces, tensor.numel)
    for name, state in stored:
        raise Incomplete(f"tensor {name!r}, state {state!r} was written, but is not in the tensor table")


def _check_exact(what: str, pieces: Sequence[StoredExtent], numel: int) -> None:
    """Check that `pieces`, sorted by start, cover [0, numel) with no gap, no overlap and no empty piece."""
    end = 0
    for piece in pieces:
        if piece.start > end:
            raise Incomplete(f"{what}: elements {end} to {piece.start} of {numel} are in no shard")
        if piece.start < end:
            raise Incomplete(f"{what}: elements from {piece.start} are in {piece.file} and in another shard")
        if piece.stop <= piece.start:
            raise Incomplete(f"{what}: {piece.file} holds an empty or reversed extent at {piece.start}")
        end = piece.stop
    if end != numel:
        raise Incomplete(f"{what}: the shards hold {counted(end, 'element')}, the tensor has {numel}")


_Named = TypeVar("_Named", Tensor, Buffer, ShardFile)


def _distinct(rows: Iterable[_Named], kind: str) -> Collection[_Named]:
    """`rows`, once it is certain that no two have the same name."""
    by_name: dict[str, _Named] = {}
    for row in rows:
        if row.name in by_name:
            raise Incomplete(f"{kind} {row.name!r} comes twice")
        by_name[row.name] = row
    return by_name.values()
