"""What rank 0 does for a checkpoint of zaya1-8b on 1,024 ranks: reports in, manifest out, commit.

Everything is real but the size of the shards: the tensor table, the extents of every rank, reports with as many
checksums as shards of full size have, 1,024 files, fsync, rename. The other ranks' writing is not timed.
"""

from __future__ import annotations

import statistics
import tempfile
import time
from itertools import pairwise
from pathlib import Path
from typing import Any

from benchmarks.common import write_result
from zslurm.checkpoint_tools import (
    BLOCK_SIZE,
    Buffer,
    Checkpoint,
    Partition,
    ShardReport,
    StoredExtent,
    Tensor,
    assemble,
    begin,
    commit,
    list_checkpoints,
    partition,
)
from zslurm.checkpoint_tools.format import layout, manifest_json
from zslurm.train.config import ModelConfig, OptimConfig
from zslurm.train.shapes import owned_table

RANKS = 1024
STATES = {True: ("master", "momentum"), False: ("master", "exp_avg", "exp_avg_sq")}


def _report(plan: Partition, table: dict[str, Tensor], rank: int) -> tuple[ShardReport, int]:
    """What a rank would report of a shard of full size, and that size."""
    name = layout.shard_name(rank, RANKS)
    extents = tuple(
        StoredExtent.of(extent.tensor, state, extent.start, extent.stop, "F32", name)
        for extent in plan.extents(rank)
        for state in table[extent.tensor].states
    )
    size = sum(extent.numel * 4 for extent in extents)
    crcs = tuple((rank * 7919 + block) & 0xFFFFFFFF for block in range(-(-size // BLOCK_SIZE)))
    buffers = (Buffer(f"rng/{rank}", "U8", (5056,), name),)
    return ShardReport(rank, RANKS, name, size, BLOCK_SIZE, crcs, extents, buffers), size


def _once(root: Path, step: int, texts: list[str], tensors: list[Tensor]) -> dict[str, float]:
    directory = begin(root, step, "bench")
    for rank in range(RANKS):
        (directory / layout.shard_name(rank, RANKS)).write_bytes(b"x" * 1024)
    clock = [time.perf_counter()]
    reports = [ShardReport.from_json(text) for text in texts]
    clock.append(time.perf_counter())
    names = [buffer.name for report in reports for buffer in report.buffers]
    manifest = assemble(
        reports, step=step, tokens=0, model={}, cursor={}, state={}, tensors=tensors, buffers=names
    )
    clock.append(time.perf_counter())
    commit(root, directory, manifest)
    clock.append(time.perf_counter())
    parse, check, write = (after - before for before, after in pairwise(clock))
    return {"parse_reports_s": parse, "assemble_s": check, "commit_s": write, "whole_s": clock[-1] - clock[0]}


def run() -> None:
    """Measure and write results/checkpoint_scale.json."""
    rows = owned_table(ModelConfig(), OptimConfig())
    tensors = [Tensor(r.name, r.shape, dict.fromkeys(STATES[bool(r.whole)], "F32"), r.whole) for r in rows]
    started = time.perf_counter()
    plan = partition(tensors, RANKS)
    planned = time.perf_counter() - started
    table = {tensor.name: tensor for tensor in tensors}
    reports, sizes = zip(*(_report(plan, table, rank) for rank in range(RANKS)), strict=True)
    texts = [report.to_json() for report in reports]
    with tempfile.TemporaryDirectory() as name:
        root = Path(name)
        runs = [_once(root, step, texts, tensors) for step in range(1, 6)]
        newest = root / layout.step_name(5)
        manifest_bytes = (newest / layout.MANIFEST).stat().st_size
        started = time.perf_counter()
        manifest_json.decode((newest / layout.MANIFEST).read_bytes(), newest / layout.MANIFEST)
        opened = time.perf_counter() - started
        with Checkpoint.open(newest, check_files=False) as checkpoint:
            assert len(checkpoint.tensors) == len(tensors)
        assert len(list_checkpoints(root)) == 5
    figures: dict[str, Any] = {
        "ranks": RANKS,
        "tensors": len(tensors),
        "rank_0": {key: round(statistics.median(run[key] for run in runs), 3) for key in runs[0]},
        "partition_s": round(planned, 3),
        "parse_manifest_s": round(opened, 3),
        "manifest_bytes": manifest_bytes,
        "bytes_per_report": round(statistics.mean(map(len, texts))),
        "shard_mib": {"mean": round(statistics.mean(sizes) / 2**20, 1), "largest": round(max(sizes) / 2**20, 1)},
        "files": RANKS + 1,
        "metadata_operations": {
            "each rank": "1 create, 1 fsync, 1 close",
            "rank 0 besides": "1 mkdir, 1 create, 3 fsyncs (manifest, directory, parent), 2 renames",
        },
    }
    write_result("checkpoint_scale", figures)
