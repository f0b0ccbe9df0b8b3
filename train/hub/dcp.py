"""torch.distributed.checkpoint (DCP) both ways, so that other trainers can take a run over and hand it back.

    model.NAME                      fp32 master weights [shape], names as in train/shapes.py
    optimizer.state.NAME.STATE      exp_avg, exp_avg_sq (AdamW) or momentum (Muon), as they are
    buffers.NAME                    balancing biases and their state, RNG states
    zslurm.manifest                 uint8 [bytes]: step, tokens, model, cursor and state, as JSON

One process, no process group, one tensor in memory at a time: DCP asks for each tensor when it is about to write
it. Importing reads them one by one, too. DCP keeps no checksums; ours are checked on the way out and made on the
way in. Its own index, `.metadata`, is a pickle, and reading a pickle can run code: import what you trust.

This is the only module of `zslurm.train.hub` that imports torch.
"""

from __future__ import annotations

import json
import math
import secrets
import shutil
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex, TensorStorageMetadata

from zslurm.checkpoint_tools import (
    Buffer,
    Checkpoint,
    Manifest,
    ShardReport,
    StoredExtent,
    Tensor,
    assemble,
    begin,
    commit,
    discard,
    list_checkpoints,
)
from zslurm.checkpoint_tools.durable import writing
from zslurm.checkpoint_tools.format import layout, manifest_json
from zslurm.checkpoint_tools.format.shard_header import DTYPES
from zslurm.checkpoint_tools.plain import StrPath, in_words, load_json, reason_of
from zslurm.checkpoint_tools.quantities import counted
from zslurm.checkpoint_tools.write import StoredRow, write_rows
from zslurm.train.errors import HubError, HubIOError
from zslurm.train.hub.export import Report, silent

MANIFEST_KEY = "zslurm.manifest"
_MASTER = "master"
_TORCH = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
_NAMES = {dtype: name for name, dtype in _TORCH.items()}


@dataclass(frozen=True)
class Converted:
    """A finished conversion: its path, its tensors (buffers included), and their bytes."""

    path: Path
    tensors: int
    bytes: int


@dataclass(frozen=True)
class _Item:
    """One entry of the DCP checkpoint, and how to read it from ours."""

    key: str
    dtype: str
    shape: tuple[int, ...]
    read: Callable[[], torch.Tensor]

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * DTYPES[self.dtype].itemsize


def export_dcp(checkpoint: Checkpoint, out: StrPath, *, report: Report = silent) -> Converted:
    """Write everything in `checkpoint` as a DCP checkpoint in the new directory `out`, which appears when whole.

    Raises:
        HubError: `out` exists.
        Damaged, ReadFailed: the checkpoint cannot be read.
        HubIOError: the file system refused.
    """
    out = Path(out)
    if out.exists():
        raise HubError(f"{out}: exists; name a new directory, or remove it first")
    items = list(_items(checkpoint))
    temporary = out.with_name(f".{out.name}.{secrets.token_hex(4)}.tmp")
    done, total = 0, sum(item.nbytes for item in items)

    def count(bytes_read: int) -> None:
        nonlocal done
        done += bytes_read
        report(done, total)

    try:
        writer = FileSystemWriter(temporary, single_file_per_rank=True, sync_files=True, thread_count=1)
        empty = {item.key: torch.empty(item.shape, dtype=_TORCH[item.dtype], device="meta") for item in items}
        _save(empty, writer, _LazyPlanner({item.key: item for item in items}, count))
        temporary.rename(out)
    except OSError as error:
        raise HubIOError(f"{out}: cannot be written: {error.strerror or error}") from error
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    return Converted(out, len(items), total)


def import_dcp(
    source: StrPath, root: StrPath, *, like: Manifest | None = None, report: Report = silent
) -> Converted:
    """Make a checkpoint of one rank of the DCP checkpoint in `source`, in `root`, a directory of checkpoints.

    `like` is the manifest of a checkpoint of the same model: if `source` has no `zslurm.manifest`, because
    another trainer wrote it, it gives the tensors that there must be, and all else. `report` gets bytes done, and
    in all.

    Raises:
        HubError: `source` is no DCP checkpoint, lacks tensors or has them in other shapes (all are named), or
            `root` holds a checkpoint of that step.
        HubIOError, CheckpointError: the file system refused.
    """
    source = Path(source)
    root = Path(root)
    reader = _open(source)
    metadata: Metadata = reader.read_metadata()
    stored = {
        key: value
        for key, value in metadata.state_dict_metadata.items()
        if isinstance(value, TensorStorageMetadata)
    }
    facts = _facts(reader, stored, like, source)
    tensors, buffers = _expected(facts, stored, source)
    step = int(facts["step"])
    if root.exists() and (
        not root.is_dir() or any(checkpoint.step == step for checkpoint in list_checkpoints(root))
    ):
        raise HubError(f"{root}: holds a checkpoint of step {step}, or is no directory; name another directory")
    with writing(root):
        root.parent.mkdir(parents=True, exist_ok=True)
    directory = begin(root, step, f"import-{secrets.token_hex(4)}")
    try:
        shard = _write(directory, reader, tensors, buffers, report)
        manifest = assemble(
            [shard],
            step=step,
            tokens=int(facts["tokens"]),
            model=facts["model"],
            cursor=facts["cursor"],
            state=facts["state"],
            tensors=tensors,
            buffers=[buffer.name for buffer in buffers],
        )
        path = commit(root, directory, manifest)
    except BaseException:
        discard(directory)
        raise
    return Converted(path, len(shard.extents) + len(shard.buffers), shard.size)


# ------------------------------------------------------------------ names


def _key(tensor: str, state: str) -> str:
    return f"model.{tensor}" if state == _MASTER else f"optimizer.state.{tensor}.{state}"


def _buffer_key(name: str) -> str:
    return f"buffers.{name}"


# -------------------------------------------------------------- exporting


def _items(checkpoint: Checkpoint) -> Iterator[_Item]:
    manifest = checkpoint.manifest
    for tensor in manifest.tensors:
        for state, dtype in tensor.states.items():
            if dtype not in _TORCH:
                raise HubError(f"{checkpoint.path}: {tensor.name} is kept as {dtype}, which torch cannot be given")
            yield _Item(_key(tensor.name, state), dtype, tensor.shape, _reader(checkpoint, tensor, state, dtype))
    for buffer in manifest.buffers:
        yield _Item(_buffer_key(buffer.name), buffer.dtype, buffer.shape, _buffer_reader(checkpoint, buffer))
    text = torch.frombuffer(bytearray(json.dumps(_facts_of(manifest)).encode()), dtype=torch.uint8)
    yield _Item(MANIFEST_KEY, "U8", tuple(text.shape), lambda: text)


def _facts_of(manifest: Manifest) -> dict[str, Any]:
    """Return step, tokens, model, cursor, state and the tables of a checkpoint, for JSON."""
    return {
        "step": manifest.step,
        "tokens": manifest.tokens,
        "model": dict(manifest.model),
        "cursor": dict(manifest.cursor),
        "state": dict(manifest.state),
        "tensors": [manifest_json.tensor_row(tensor) for tensor in manifest.tensors],
        "buffers": [buffer.name for buffer in manifest.buffers],
    }


def _reader(checkpoint: Checkpoint, tensor: Tensor, state: str, dtype: str) -> Callable[[], torch.Tensor]:
    def read() -> torch.Tensor:
        out = np.empty(tensor.numel, DTYPES[dtype])
        checkpoint.read(tensor.name, state, 0, tensor.numel, out)
        return torch.from_numpy(out).view(_TORCH[dtype]).view(tensor.shape)

    return read


def _buffer_reader(checkpoint: Checkpoint, buffer: Buffer) -> Callable[[], torch.Tensor]:
    return lambda: torch.from_numpy(checkpoint.read_buffer(buffer.name)).view(_TORCH[buffer.dtype])


class _LazyPlanner(DefaultSavePlanner):
    """Plans with empty tensors, and reads each when it is to be written."""

    def __init__(self, items: dict[str, _Item], count: Callable[[int], None]) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)
        self._items, self._count = items, count

    def lookup_object(self, index: MetadataIndex) -> torch.Tensor:
        item = self._items[index.fqn]
        tensor = item.read()
        self._count(item.nbytes)
        return tensor


@contextmanager
def _quietly() -> Iterator[None]:
    """Without torch's warning that there is no process group, and with the cause of its errors for an error."""
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="torch.distributed is disabled")
            yield
    except dcp.api.CheckpointException as error:  # derived from BaseException
        raise _cause(error) from None


def _save(tensors: dict[str, torch.Tensor], writer: FileSystemWriter, planner: DefaultSavePlanner) -> None:
    with _quietly():
        dcp.save(tensors, storage_writer=writer, planner=planner, no_dist=True)


def _cause(error: Any) -> BaseException:
    """Return the first exception behind DCP's own, whose message is a traceback."""
    cause: BaseException = next(iter(error.failures.values()))[0]
    return cause


# -------------------------------------------------------------- importing


class _Reader(FileSystemReader):
    """Reads the index once: tensors are loaded one at a time, and each load asks for it."""

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self._metadata: Metadata | None = None

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        if self._metadata is None:
            self._metadata = super().read_metadata(*args, **kwargs)
        return self._metadata


def _open(source: Path) -> _Reader:
    if not (source / ".metadata").is_file():
        raise HubError(f"{source}: no DCP checkpoint (it has no .metadata); check the path")
    reader = _Reader(source)
    try:
        reader.read_metadata()
    except Exception as error:
        raise HubError(
            f"{source}/.metadata cannot be read ({in_words(error)}); is it a DCP checkpoint?"
        ) from error
    return reader


def _load(reader: _Reader, key: str, dtype: torch.dtype, shape: tuple[int, ...]) -> torch.Tensor:
    state = {key: torch.empty(shape, dtype=dtype)}
    try:
        with _quietly():
            dcp.load(state, storage_reader=reader, no_dist=True)
    except Exception as error:  # torch's unpickler raises almost anything for a damaged file
        why = reason_of(error) if isinstance(error, (OSError, RuntimeError)) else "its part is damaged"
        raise HubError(f"{reader.path}: {key} cannot be read: {why}") from error
    return state[key]


def _facts(
    reader: _Reader, stored: dict[str, TensorStorageMetadata], like: Manifest | None, source: Path
) -> dict[str, Any]:
    """Return what `_facts_of` wrote into the DCP checkpoint, or the facts of `like`."""
    if MANIFEST_KEY in stored:
        text = _load(reader, MANIFEST_KEY, torch.uint8, tuple(stored[MANIFEST_KEY].size))
        try:
            facts: dict[str, Any] = load_json(bytes(text.numpy()))
        except ValueError as error:
            raise HubError(f"{source}: {MANIFEST_KEY} is damaged: {error}") from error
        return facts
    if like is None:
        raise HubError(
            f"{source}: does not describe the model (no {MANIFEST_KEY}): another trainer wrote it; "
            "name a checkpoint of the same model with --like"
        )
    return _facts_of(like)


def _expected(
    facts: dict[str, Any], stored: dict[str, TensorStorageMetadata], source: Path
) -> tuple[list[Tensor], list[Buffer]]:
    """Return the tensors and buffers that there must be, all of them there in their shapes."""
    tensors = [Tensor(**{**row, "shape": tuple(row["shape"])}) for row in facts["tensors"]]
    problems = []
    for tensor in tensors:
        for state in tensor.states:
            entry = stored.get(_key(tensor.name, state))
            if entry is None:
                problems.append(f"{_key(tensor.name, state)} is missing")
            elif tuple(entry.size) != tensor.shape:
                problems.append(
                    f"{_key(tensor.name, state)} is {list(entry.size)} instead of {list(tensor.shape)}"
                )
    buffers = []
    for name in facts["buffers"]:
        entry = stored.get(_buffer_key(name))
        if entry is None or entry.properties.dtype not in _NAMES:
            problems.append(f"{_buffer_key(name)} is missing, or of no known format")
        else:
            buffers.append(Buffer(name, _NAMES[entry.properties.dtype], tuple(entry.size), ""))
    if problems:
        raise HubError(
            f"{source}: {counted(len(problems), 'tensor does not fit', 'tensors do not fit')}: "
            + "; ".join(problems)
        )
    return tensors, buffers


def _write(
    directory: Path, reader: _Reader, tensors: list[Tensor], buffers: list[Buffer], report: Report
) -> ShardReport:
    """Write one shard, its tensors loaded one by one as they are written."""
    file = layout.shard_name(0, 1)
    rows: list[StoredRow] = [
        (StoredExtent.of(tensor.name, state, 0, tensor.numel, dtype, file), tensor.shape)
        for tensor in tensors
        for state, dtype in tensor.states.items()
        if tensor.numel
    ]
    rows += [(replace(buffer, file=file), buffer.shape) for buffer in buffers]
    shapes = dict(rows)
    done, total = 0, sum(math.prod(shape) * DTYPES[row.dtype].itemsize for row, shape in rows)

    def content(row: StoredExtent | Buffer) -> Iterator[memoryview]:
        nonlocal done
        key = _key(row.tensor, row.state) if isinstance(row, StoredExtent) else _buffer_key(row.name)
        tensor = _load(reader, key, _TORCH[row.dtype], shapes[row])
        array = tensor.contiguous().view(-1).view(torch.uint8).numpy()
        done += array.size
        report(done, total)
        yield array.data

    return write_rows(directory, 0, 1, rows, content)
