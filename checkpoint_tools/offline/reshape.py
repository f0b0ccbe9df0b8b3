"""Rewriting a checkpoint for another number of ranks, offline: no torch, no GPU, bounded memory.

Loading at any world size needs no reshape: every rank reads the extents it owns now. A reshaped checkpoint is
one in which each of the new ranks finds its share in one file, in one piece, in the order of its memory: what
a large run wants before it starts, and what gives a checkpoint of another size to programs that expect one.

Each new shard is an intersection of intervals: its extents come from `partition`, the function that the
trainer uses, and are read from the old shards with `pread`, block by block, each block checked. A shard is
streamed: its header first, then its elements, through a ring of RING_BLOCKS blocks, with checksums on the way.
Buffers move whole: an old rank's go to the new rank of that number, or to rank 0. Nothing is dropped and no
number is changed, so N -> M -> N gives the same bytes of every tensor and buffer.

    step                                     what holds after a kill right after it
    make .DST.<host>-<pid>.tmp               SRC is only read, and nothing is named DST
    write and sync every shard               the same
    read everything back, compare checksums  the same
    write and sync the manifest              the same
    rename to DST, sync the parent           DST is whole

Cost: the checkpoint's bytes read once and written once, then read again to verify; per worker RING_BLOCKS
plus `read.OPEN_FILES` blocks of memory. A temporary directory that a killed reshape left is removed by the
next one to the same DST on that host.
"""

from __future__ import annotations

import math
import os
import re
import secrets
import socket
from collections import defaultdict
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from queue import SimpleQueue
from threading import Event, Lock

from zslurm.checkpoint_tools.commit import write_manifest
from zslurm.checkpoint_tools.durable import remove, sync, writing
from zslurm.checkpoint_tools.errors import CheckpointError, Mismatch, NoSpace, WriteFailed
from zslurm.checkpoint_tools.format import layout, manifest_json
from zslurm.checkpoint_tools.format.manifest import Buffer, Manifest, StoredExtent
from zslurm.checkpoint_tools.format.partition import MAX_RANKS, partition
from zslurm.checkpoint_tools.format.shard_header import DTYPES
from zslurm.checkpoint_tools.offline.verify import verify
from zslurm.checkpoint_tools.plain import StrPath
from zslurm.checkpoint_tools.quantities import counted, show_bytes
from zslurm.checkpoint_tools.read import OPEN_FILES, Checkpoint
from zslurm.checkpoint_tools.report import ShardReport, assemble
from zslurm.checkpoint_tools.write import StoredRow, shard_opening, write_rows

RING_BLOCKS = 4
WORKERS = 4
"""Shards that are written at once by default: while some wait for the disk, others compute."""

MAX_MEMORY = 256 << 20
"""Bytes of buffers that `reshape` uses at most, unless the caller sets another limit."""

Report = Callable[[str, int, int], None]
"""Gets the stage ("writing" or "verifying"), bytes done, and bytes in all."""


@dataclass(frozen=True, slots=True)
class ReshapePlan:
    """What a reshape would write: `bytes` in `files` shards and a manifest, with `workers` at once."""

    source: Path
    destination: Path
    from_ranks: int
    to_ranks: int
    files: int
    bytes: int
    largest_file: int
    workers: int


def plan_reshape(
    source: StrPath, destination: StrPath, ranks: int, *, workers: int = WORKERS, max_memory: int = MAX_MEMORY
) -> ReshapePlan:
    """Check that `reshape` with the same arguments can be done, and return what it would write.

    Raises:
        Mismatch: `ranks` is below 1, above the number of elements or above MAX_RANKS, `destination` exists or
            is inside `source`, or the memory does not do for one worker.
        NoSpace: the file system of `destination` has less room than the checkpoint needs.
        NotACheckpoint, Damaged, Incomplete, VersionTooNew, ReadFailed: as `Checkpoint.open`.
    """
    source = Path(source)
    destination = Path(destination)
    with Checkpoint.open(source) as checkpoint:
        manifest = checkpoint.manifest
    _check_destination(source, destination)
    elements = sum(tensor.numel for tensor in manifest.tensors)
    most = max(1, min(elements, MAX_RANKS))
    if not 1 <= ranks <= most:
        raise Mismatch(
            f"cannot divide {counted(elements, 'element')} over {counted(ranks, 'rank')}; give 1 to {most}"
        )
    buffers_of_worker = (RING_BLOCKS + OPEN_FILES) * manifest.block_size
    if max_memory < buffers_of_worker:
        raise Mismatch(
            f"one worker needs {show_bytes(buffers_of_worker)} of buffers; allow at least that, "
            f"not {show_bytes(max_memory)}"
        )
    target = _Target(manifest, ranks)
    sizes = [target.file_size(rank) for rank in range(ranks)]
    total = sum(sizes)
    with writing(destination.parent):
        room = os.statvfs(_existing(destination.parent))
    free = room.f_bavail * room.f_frsize
    if free < total:
        raise NoSpace(
            f"{destination} needs {show_bytes(total)}, its file system has {show_bytes(free)} free; "
            "free space, or choose another place"
        )
    return ReshapePlan(
        source=source,
        destination=destination,
        from_ranks=manifest.world_size,
        to_ranks=ranks,
        files=ranks,
        bytes=total,
        largest_file=max(sizes),
        workers=max(1, min(workers, max_memory // buffers_of_worker, ranks)),
    )


def reshape(
    source: StrPath,
    destination: StrPath,
    ranks: int,
    *,
    workers: int = WORKERS,
    max_memory: int = MAX_MEMORY,
    report: Report = lambda stage, done, total: None,
) -> ReshapePlan:
    """Write the checkpoint at `source` as one of `ranks` ranks at `destination`, which appears when it is whole.

    `workers` shards are written at once, with `max_memory` bytes of buffers over all of them. `report` is called
    by one thread at a time.

    Raises:
        Mismatch, NoSpace: see `plan_reshape`; nothing was written.
        Damaged: a byte of `source` is not what was written.
        WriteFailed, ReadFailed: the file system refused.
        What was written is removed whatever happens, an interrupt included.
    """
    source = Path(source)
    destination = Path(destination)
    plan = plan_reshape(source, destination, ranks, workers=workers, max_memory=max_memory)
    directory = _temporary(destination)
    try:
        with writing(destination.parent):
            destination.parent.mkdir(parents=True, exist_ok=True)
            _sweep(destination)
            directory.mkdir()
        manifest = _write(plan, directory, report)
        with writing(directory):
            write_manifest(directory, manifest_json.encode(manifest))
            sync(directory)
        verification = verify(
            directory, threads=plan.workers, report=lambda done, total: report("verifying", done, total)
        )
        if not verification.sound:
            worst = verification.damages[0]
            raise WriteFailed(
                f"{destination}: {worst.file} does not read back as written ({worst.reason}); check the disk"
            )
        with writing(destination):
            directory.rename(destination)
            sync(destination.parent)
    except BaseException:
        remove(directory)
        raise
    return plan


def _write(plan: ReshapePlan, directory: Path, report: Report) -> Manifest:
    lock, done, stop = Lock(), 0, Event()

    def add(count: int) -> None:
        nonlocal done
        if stop.is_set():
            raise CheckpointError("another shard could not be written")
        with lock:
            done += count
            report("writing", done, plan.bytes)

    with ExitStack() as stack:
        idle: SimpleQueue[Checkpoint] = SimpleQueue()  # one for each worker: they are not shared
        for _ in range(plan.workers):
            idle.put(stack.enter_context(Checkpoint.open(plan.source, check_files=False)))
        source = idle.get()
        idle.put(source)
        target = _Target(source.manifest, plan.to_ranks)

        def write(rank: int) -> ShardReport:
            checkpoint = idle.get()
            try:
                return _write_shard(checkpoint, target, directory, rank, add)
            finally:
                idle.put(checkpoint)

        pool = stack.enter_context(ThreadPoolExecutor(plan.workers, thread_name_prefix="reshape"))
        stack.callback(pool.shutdown, cancel_futures=True)
        stack.callback(stop.set)
        reports = list(pool.map(write, range(plan.to_ranks)))
    manifest = target.manifest
    return assemble(
        reports,
        step=manifest.step,
        tokens=manifest.tokens,
        model=manifest.model,
        cursor=manifest.cursor,
        state=manifest.state,
        tensors=manifest.tensors,
        buffers=[buffer.name for buffer in manifest.buffers],
    )


class _Target:
    """Which of the new ranks writes what."""

    def __init__(self, manifest: Manifest, ranks: int) -> None:
        self.manifest, self.ranks = manifest, ranks
        self._partition = partition(manifest.tensors, ranks)
        self._states = {tensor.name: tensor.states for tensor in manifest.tensors}
        states = {state for tensor in manifest.tensors for state in tensor.states}
        self._order = sorted(states, key=lambda state: (state != "master", state))
        old = {file.name: rank for rank, file in enumerate(manifest.files)}
        self._buffers: dict[int, list[Buffer]] = defaultdict(list)
        for buffer in manifest.buffers:
            rank = old[buffer.file]
            self._buffers[rank if rank < ranks else 0].append(buffer)

    def rows(self, rank: int) -> list[StoredRow]:
        """Return what a shard holds: state by state, the master weights first, then buffers."""
        file = layout.shard_name(rank, self.ranks)
        rows: list[StoredRow] = [
            (StoredExtent.of(extent.tensor, state, extent.start, extent.stop, dtype, file), (extent.numel,))
            for state in self._order
            for extent in self._partition.extents(rank)
            if (dtype := self._states[extent.tensor].get(state))
        ]
        return rows + [(replace(buffer, file=file), buffer.shape) for buffer in self._buffers.get(rank, ())]

    def file_size(self, rank: int) -> int:
        """Return the bytes of a shard."""
        rows = self.rows(rank)
        data = sum(math.prod(shape) * DTYPES[row.dtype].itemsize for row, shape in rows)
        return len(shard_opening(rows, rank, self.ranks)) + data


def _write_shard(
    checkpoint: Checkpoint, target: _Target, directory: Path, rank: int, add: Callable[[int], None]
) -> ShardReport:
    """Write one of the new shards; its pieces are in a ring of RING_BLOCKS blocks.

    A piece is overwritten when at least RING_BLOCKS - 2 more blocks were made.
    """
    import numpy as np

    block_size = target.manifest.block_size
    length = max(block_size, 64)
    ring, used, read = np.empty(RING_BLOCKS * length, np.uint8), 0, 0

    def content(row: StoredExtent | Buffer) -> Iterator[memoryview]:
        nonlocal used, read
        if isinstance(row, Buffer):
            piece = checkpoint.read_buffer(row.name).reshape(-1).view("u1")
            read += piece.size
            add(piece.size)
            yield piece.data
            return
        dtype = DTYPES[row.dtype]
        for start in range(row.start, row.stop, length // dtype.itemsize):
            stop = min(start + length // dtype.itemsize, row.stop)
            size = (stop - start) * dtype.itemsize
            if used + size > ring.size:
                used = 0
            piece = ring[used : used + size]
            checkpoint.read(row.tensor, row.state, start, stop, piece.view(dtype))
            read += size
            add(size)
            yield piece.data
            used += size

    shard = write_rows(directory, rank, target.ranks, target.rows(rank), content, block_size=block_size)
    add(shard.size - read)
    return shard


def _check_destination(source: Path, destination: Path) -> None:
    if os.path.lexists(destination):
        raise Mismatch(f"{destination} exists; name a new directory, or remove it first")
    if source.resolve() in (destination.resolve(), *destination.resolve().parents):
        raise Mismatch(f"{destination} is inside the checkpoint {source}; choose a place outside of it")


def _existing(path: Path) -> Path:
    while not path.exists() and path != path.parent:
        path = path.parent
    return path


def _temporary(destination: Path) -> Path:
    return (
        destination.parent / f".{destination.name}.{socket.gethostname()}-{os.getpid()}-{secrets.token_hex(2)}.tmp"
    )


def _sweep(destination: Path) -> None:
    """Remove what reshapes to the same place left that were killed on this host."""
    pattern = re.compile(
        rf"\.{re.escape(destination.name)}\.{re.escape(socket.gethostname())}-(\d+)-[0-9a-f]+\.tmp"
    )
    for path in destination.parent.iterdir():
        match = pattern.fullmatch(path.name)
        if match and int(match[1]) != os.getpid() and not Path(f"/proc/{match[1]}").exists():
            remove(path)
