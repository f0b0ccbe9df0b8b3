"""Storage: random and sequential reads, writes, saves as training makes them, and operations on names.

    random_read        16 KiB, as the loader reads sequences of 4,096 tokens, `depth` at a time on each rank
    sequential_read    4 MiB after 4 MiB
    sequential_write   the same, and an fsync
    checkpoint         every rank writes its shard and syncs it, rank 0 commits (zslurm/checkpoint_tools)
    create, stat,      empty files in a directory of each rank, which stats and lists those that a rank of the next
    list, unlink       node made, and removes its own; with one node they are in its cache

All ranks work at the same time. `per_s` is the sum of their rates, `pages_per_s` the same in pages of 4 KiB, which
`zslurm plan io` counts. A save is one operation, and takes from its beginning to its commit. `seconds` is the
median of one operation on the ranks, `p99_us` the 99th percentile of the slowest rank; `from_storage` is the part
of the bytes read that the kernel counted as read from the storage: less than 1 if a cache of the machine gave
some, 0 also if the file system does not count.

No file outlives its rank: those for reading and writing have no name, the others are in a directory that another
process removes when the rank ends, however it ends (work_directory.py).
"""

from __future__ import annotations

import os
import shutil
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
from functools import cache, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np

from zslurm.bench import storage_io
from zslurm.bench.measurement import MeasurementPlan, Options, Point, Row
from zslurm.bench.run.timing import summarize
from zslurm.bench.run.work_directory import WorkDirectory
from zslurm.bench.storage_io import LARGE, ScratchFile, StorageRun
from zslurm.bench.storage_space import refusal
from zslurm.checkpoint_tools import Entry, ShardReport, Tensor, assemble, begin, commit, write_shard
from zslurm.checkpoint_tools.errors import CheckpointError
from zslurm.core.errors import ZslurmError
from zslurm.train.plan.io import PAGE_BYTES

if TYPE_CHECKING:
    from zslurm.bench.ranks import BenchRanks
    from zslurm.bench.result import MeasuredMachine

T = TypeVar("T")

BLOCK = 16384
_TENSORS = 16  # of which each rank's shard has a part
_SLOW = 1.2  # times the median of all ranks' shards: such a rank is named
_GUESS_BYTES_S, _GUESS_OPERATIONS_S = 2e8, 2e3  # of a rank, for the first estimate


def points(options: Options, machine: MeasuredMachine) -> MeasurementPlan:
    """Return the points: random reads at each depth, then the others.

    Raises:
        ZslurmError: the directory cannot be measured.
    """
    size, checkpoint, files = options["size"], options["checkpoint"], options["files"]
    reason = refusal(
        Path(options["path"]), size=size, checkpoint=checkpoint,
        ranks_per_node=machine.ranks_per_node, nodes=len(machine.nodes),
    )  # fmt: skip
    if reason is not None:
        raise ZslurmError(reason)
    common = {name: options[name] for name in ("path", "work", "size")}
    once = size * machine.ranks_per_node / _GUESS_BYTES_S
    planned = [Point({"operation": "sequential_write", "depth": 1, "bytes": LARGE} | common, once)]
    for depth in options["depths"]:
        values = {"operation": "random_read", "depth": depth, "bytes": BLOCK, "limit_s": options["seconds"]}
        planned.append(Point(values | common, options["seconds"] + 0.1))
    planned.append(Point({"operation": "sequential_read", "depth": 1, "bytes": LARGE} | common, once))
    seconds = 4 * files * machine.ranks_per_node / _GUESS_OPERATIONS_S
    planned.append(Point({"operation": "names", "depth": 1, "bytes": 0, "files": files} | common, seconds))
    saves = options["saves"]
    planned.append(
        Point(
            {"operation": "checkpoint", "depth": 1, "bytes": checkpoint, "saves": saves} | common,
            saves * checkpoint * machine.ranks_per_node / _GUESS_BYTES_S,
        )
    )
    return MeasurementPlan(planned)


def run(point: Point, ranks: BenchRanks) -> list[Row]:
    """Measure one point.

    Raises:
        ZslurmError: a rank failed; all of them stop, and the message names it.
    """
    values = point.values
    work = _prepare(values, ranks)
    measure = {
        "sequential_write": _write,
        "sequential_read": _read,
        "random_read": _read_randomly,
        "checkpoint": _save,
        "names": _names,
    }[values["operation"]]
    try:
        return measure(values, work, ranks)
    except ZslurmError as error:
        raise ZslurmError(f"{values['path']}: {error}") from error


def together(ranks: BenchRanks, action: Callable[[], T]) -> list[T] | None:
    """Return what every rank's action returned, plain values in order, on rank 0; None on the others.

    They begin at the same time. If one fails, all of them raise.

    Raises:
        ZslurmError: the action of a rank failed.
    """
    ranks.barrier()
    answer: dict[str, Any]
    try:
        answer = {"value": action()}
    except (OSError, CheckpointError) as error:
        reason = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
        answer = {"failed": f"rank {ranks.rank} on {ranks.nodes[ranks.node]}: {reason}"}
    answers = ranks.gather(answer)
    failed = (
        None
        if answers is None
        else next((rank_answer["failed"] for rank_answer in answers if "failed" in rank_answer), None)
    )
    if (reason := ranks.share(failed)) is not None:
        raise ZslurmError(reason)
    return None if answers is None else [rank_answer["value"] for rank_answer in answers]


# --- files ------------------------------------------------------------------------------------------------------

_WORK: dict[str, WorkDirectory] = {}


def _prepare(values: dict[str, Any], ranks: BenchRanks) -> Path:
    """Make this node's working directory, once; on a shared file system the nodes have one and the same."""
    path = Path(values["path"]) / str(values["work"])

    def make() -> None:
        if ranks.local_rank == 0 and values["work"] not in _WORK:
            _WORK[values["work"]] = WorkDirectory(path)

    together(ranks, make)
    return path


@cache
def _scratch(work: Path, rank: int, size: int) -> ScratchFile:
    return ScratchFile(work, f"scratch-{rank}", size)


@cache
def _filled(work: Path, rank: int, size: int) -> ScratchFile:
    """Return the scratch file once it is written; points may have been left out."""
    file = _scratch(work, rank, size)
    if os.fstat(file.descriptor).st_size < size:
        file.write()
    return file


def _how(is_direct: Sequence[bool]) -> str:
    return "direct" if all(is_direct) else "cache dropped"


def _write(values: dict[str, Any], work: Path, ranks: BenchRanks) -> list[Row]:
    def write() -> dict[str, Any]:
        file = _scratch(work, ranks.rank, values["size"])
        return asdict(file.write()) | {"direct": file.is_direct}

    return _rows(values, together(ranks, write), ranks)


def _read(values: dict[str, Any], work: Path, ranks: BenchRanks) -> list[Row]:
    return _rows(values, _counted(values, work, ranks, lambda file: file.read()), ranks)


def _read_randomly(values: dict[str, Any], work: Path, ranks: BenchRanks) -> list[Row]:
    depth, seconds = values["depth"], values["limit_s"]
    readings = _counted(values, work, ranks, lambda file: file.read_randomly(depth, seconds, BLOCK))
    return _rows(values, readings, ranks)


def _counted(
    values: dict[str, Any], work: Path, ranks: BenchRanks, read: Callable[[ScratchFile], StorageRun]
) -> list[dict[str, Any]] | None:
    """Read on all ranks, and note what the kernel counted as read from the storage."""
    together(ranks, lambda: _filled(work, ranks.rank, values["size"]) and None)

    def measure() -> dict[str, Any]:
        file = _filled(work, ranks.rank, values["size"])
        before = storage_io.read_bytes()
        reading = read(file)
        after = storage_io.read_bytes()
        kernel = None if before is None or after is None else after - before
        return asdict(reading) | {"direct": file.is_direct, "kernel_bytes": kernel}

    return together(ranks, measure)


def _rows(values: dict[str, Any], found: list[dict[str, Any]] | None, ranks: BenchRanks) -> list[Row]:
    """Return the row of what all ranks did at once; on rank 0."""
    if found is None:
        return []
    per_s = sum(reading["operations"] / reading["elapsed"] for reading in found)
    windows = [sum(rates) for rates in zip(*(reading["windows"] for reading in found), strict=False)]
    timing = summarize(windows) if windows else None
    row = {
        "operation": values["operation"],
        "depth": values["depth"],
        "bytes": values["bytes"] or None,
        "nodes": len(ranks.nodes),
        "ranks": ranks.size,
        "per_s": per_s,
        "pages_per_s": per_s * BLOCK / PAGE_BYTES if values["operation"] == "random_read" else None,
        "mb_s": per_s * values["bytes"] / 1e6 if values["bytes"] else None,
        "seconds": statistics.median(reading["median"] for reading in found),
        "p99_us": 1e6 * max(reading["p99"] for reading in found),
        "spread": timing.spread if timing else 0.0,
        "samples": timing.samples if timing else 1,
        "how": _how([reading["direct"] for reading in found]) if "direct" in found[0] else "",
        "from_storage": None,
        "slowest": None,
    }
    counts = [reading.get("kernel_bytes") for reading in found]
    if None not in counts:
        asked = sum(reading["operations"] for reading in found) * values["bytes"]
        row["from_storage"] = round(sum(count for count in counts if count is not None) / asked, 3)
    return [row]


# --- saves ------------------------------------------------------------------------------------------------------


def _save(values: dict[str, Any], work: Path, ranks: BenchRanks) -> list[Row]:
    """Save as training does (zslurm/train/checkpointing/writer.py), several times; each save is removed.

    Raises:
        ZslurmError: a rank failed, or the nodes do not share the directory.
    """
    if not _is_shared(work, ranks):
        raise ZslurmError("the nodes do not share this directory, so no checkpoint can be saved there")
    root = work / "checkpoints"
    tensor_bytes = max(1, values["bytes"] // 4 // _TENSORS)
    entries = _entries(tensor_bytes, ranks.rank)
    total = 4 * tensor_bytes * _TENSORS * ranks.size
    saves: list[float] = []
    shards: list[list[float]] = []
    for step in range(1, values["saves"] + 1):
        began = time.perf_counter()
        directory = Path(_of_first(together(ranks, partial(_begin, root, step, ranks)), ranks))
        written = together(ranks, partial(_shard, directory, entries, ranks))
        together(ranks, partial(_commit, root, directory, step, written, tensor_bytes, ranks))
        saves.append(time.perf_counter() - began)
        shards.append([seconds for _, seconds in written or []])
        together(ranks, lambda: shutil.rmtree(root, ignore_errors=True) if ranks.is_first else None)
    if not ranks.is_first:
        return []
    timing = summarize(saves)
    by_rank = [statistics.median(times) for times in zip(*shards, strict=True)]
    slowest = by_rank.index(max(by_rank))
    stands_out = by_rank[slowest] > _SLOW * statistics.median(by_rank)
    return [
        {
            "operation": "checkpoint",
            "depth": 1,
            "bytes": 4 * tensor_bytes * _TENSORS,
            "nodes": len(ranks.nodes),
            "ranks": ranks.size,
            "per_s": 1 / timing.seconds,
            "pages_per_s": None,
            "mb_s": total / timing.seconds / 1e6,
            "seconds": timing.seconds,
            "p99_us": 1e6 * max(saves),
            "spread": timing.spread,
            "samples": timing.samples,
            "how": "fsync",
            "from_storage": None,
            "slowest": f"rank {slowest} on {ranks.nodes[slowest // ranks.local_size]}" if stands_out else None,
        }
    ]


def _entries(each: int, rank: int) -> list[Entry]:
    """Return this rank's part of the tensors; `each` elements of every one."""
    values = np.random.default_rng(rank).random(each, np.float32)
    start, stop = rank * each, (rank + 1) * each
    return [Entry(f"tensor.{index}", "master", start, stop, values) for index in range(_TENSORS)]


def _of_first(found: list[T] | None, ranks: BenchRanks) -> T:
    """Return rank 0's value on all ranks."""
    value: T = ranks.share(None if found is None else found[0])
    return value


def _begin(root: Path, step: int, ranks: BenchRanks) -> str:
    return str(begin(root, step, f"bench{step}")) if ranks.is_first else ""


def _shard(directory: Path, entries: list[Entry], ranks: BenchRanks) -> tuple[str, float]:
    """Write this rank's shard; returns its report, and the seconds that it took."""
    began = time.perf_counter()
    report = write_shard(directory, ranks.rank, ranks.size, entries)
    return report.to_json(), time.perf_counter() - began


def _commit(
    root: Path, directory: Path, step: int, written: list[tuple[str, float]] | None, each: int, ranks: BenchRanks
) -> None:
    if written is None:
        return
    names = [f"tensor.{index}" for index in range(_TENSORS)]
    tensors = [Tensor(name, (each * ranks.size,), {"master": "F32"}) for name in names]
    reports = [ShardReport.from_json(text) for text, _ in written]
    empty: dict[str, Any] = {}
    manifest = assemble(reports, step=step, tokens=0, model=empty, cursor=empty, state=empty, tensors=tensors)
    commit(root, directory, manifest)


# --- names ------------------------------------------------------------------------------------------------------


def _names(values: dict[str, Any], work: Path, ranks: BenchRanks) -> list[Row]:
    """Make, look at, list and remove empty files; rows of the four operations."""
    count = values["files"]
    own_directory = work / f"names-{ranks.rank}"
    peer_directory = own_directory
    if _is_shared(work, ranks):
        peer_directory = work / f"names-{(ranks.rank + ranks.local_size) % ranks.size}"
    together(ranks, own_directory.mkdir)
    rows = []
    for operation, directory, action in (
        ("create", own_directory, storage_io.create_files),
        ("stat", peer_directory, storage_io.stat_files),
        ("list", peer_directory, storage_io.list_files),
        ("unlink", own_directory, storage_io.unlink_files),
    ):
        actions = together(ranks, partial(_as_row, action, directory, count))
        rows += _rows(values | {"operation": operation}, actions, ranks)
    together(ranks, own_directory.rmdir)
    return rows


def _as_row(action: Callable[[Path, int], StorageRun], directory: Path, count: int) -> dict[str, Any]:
    return asdict(action(directory, count))


def _is_shared(work: Path, ranks: BenchRanks) -> bool:
    """Return whether each node sees what the others make; all ranks call it."""
    marks = [f"node-{node}" for node in range(len(ranks.nodes))]
    together(ranks, (work / marks[ranks.node]).touch)
    seen = together(ranks, lambda: all((work / mark).exists() for mark in marks))
    shared: bool = ranks.share(None if seen is None else all(seen))
    return shared
