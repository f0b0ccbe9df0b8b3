"""Checkpoints: what saving costs a run, and the rates of saving, loading, reshaping and verifying.

Four ranks on this machine, 1.2 GB of state, on disk and in memory (tmpfs), medians, contenders in turn: see
checkpoint_ranks.py. Then, in one process: many small tensors against torch.distributed.checkpoint, and a restart
from the node's own copies against one from the shared directory, whose files are out of the page cache. What is
done to checkpoints offline is measured by checkpoint_offline.py.
"""

from __future__ import annotations

import multiprocessing
import os
import resource
import shutil
import socket
import statistics
import subprocess
import tempfile
import time
import warnings
from collections.abc import Callable
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed.checkpoint as dcp

from benchmarks.checkpoints.checkpoint_ranks import STATES, Settings, measure
from benchmarks.common import alternate, write_result
from zslurm.checkpoint_tools import (
    Checkpoint,
    Entry,
    Tensor,
    assemble,
    begin,
    commit,
    keep_copy,
    local_tier,
    partition,
    write_shard,
)

RANKS = 4
SETTINGS = Settings(elements=25_165_824, runs=5, steps=24, save_at=(1, 10), products=120)
SMALL_TENSORS, SMALL_ELEMENTS = 4000, 4096


def _ranks(root: Path) -> dict[str, Any]:
    context = multiprocessing.get_context("spawn")
    answer = context.Queue()
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    ranks = [
        context.Process(target=_quiet_measure, args=(rank, RANKS, port, root / "saves", SETTINGS, answer))
        for rank in range(RANKS)
    ]
    for process in ranks:
        process.start()
    for process in ranks:
        process.join()
        assert process.exitcode == 0
    figures: dict[str, Any] = answer.get()
    stalls = figures["stall_s"]
    figures["stall_ratio_to_ours"] = {
        name: round(seconds / stalls["ours"], 1) for name, seconds in stalls.items() if name != "ours"
    }
    figures["load_ratio_dcp_to_ours"] = round(figures["load_s"]["dcp"] / figures["load_s"]["ours"], 2)
    dd = _dd(root / "dd", figures["bytes"])
    figures["dd_s"] = round(dd, 3)
    figures["write_rate_of_dd"] = round(dd / figures["whole_save_s"], 2)
    return figures


def _quiet_measure(rank: int, *arguments: Any) -> None:
    warnings.filterwarnings("ignore")
    measure(rank, *arguments)


def _dd(path: Path, size: int, runs: int = 3) -> float:
    """Seconds of `dd conv=fsync` of as many bytes."""
    times = []
    for _ in range(runs):
        started = time.perf_counter()
        subprocess.run(
            ["dd", "if=/dev/zero", f"of={path}", "bs=4M", f"count={size // (4 << 20)}", "conv=fsync"],
            check=True,
            capture_output=True,
        )
        times.append(time.perf_counter() - started)
        path.unlink()
    return statistics.median(times)


def save(root: Path, tensors: list[Tensor], ranks: int, *, tier: Path | None = None) -> Path:
    """A checkpoint of random numbers."""
    directory = begin(root, 1, "bench")
    layout = partition(tensors, ranks)
    reports = []
    for rank in range(ranks):
        extents = layout.extents(rank)
        values = np.random.default_rng(rank).random(max((e.numel for e in extents), default=0), np.float32)
        entries = [Entry(e.tensor, state, e.start, e.stop, values[: e.numel]) for state in STATES for e in extents]
        reports.append(write_shard(directory, rank, ranks, entries))
        if tier is not None:
            keep_copy(tier, 1, reports[-1], entries, [])
    manifest = assemble(reports, step=1, tokens=0, model={}, cursor={}, state={}, tensors=tensors)
    return commit(root, directory, manifest)


def _read(path: Path, tier: Path | None = None) -> None:
    with Checkpoint.open(path, local=tier) as checkpoint:
        for tensor in checkpoint.manifest.tensors:
            for state in tensor.states:
                checkpoint.read(tensor.name, state, 0, tensor.numel, np.empty(tensor.numel, np.float32))


def _small_tensors(root: Path) -> dict[str, Any]:
    table = [Tensor(f"t{i}", (SMALL_ELEMENTS,), {"master": "F32"}) for i in range(SMALL_TENSORS)]
    state = {tensor.name: torch.randn(SMALL_ELEMENTS) for tensor in table}
    count = 0

    def save_ours() -> None:
        nonlocal count
        count += 1
        directory = begin(root / "ours", count, "bench")
        entries = [Entry(name, "master", 0, SMALL_ELEMENTS, tensor.numpy()) for name, tensor in state.items()]
        report = write_shard(directory, 0, 1, entries)
        commit(
            root / "ours",
            directory,
            assemble([report], step=count, tokens=0, model={}, cursor={}, state={}, tensors=table),
        )

    def save_dcp() -> None:
        nonlocal count
        count += 1
        dcp.save(state, checkpoint_id=root / f"dcp-{count}", no_dist=True)

    saves = alternate({"ours": save_ours, "dcp": save_dcp}, runs=5)
    ours, theirs = max((root / "ours").iterdir()), max(root.glob("dcp-*"))
    loads = alternate(
        {"ours": lambda: _read(ours), "dcp": lambda: dcp.load(state, checkpoint_id=theirs, no_dist=True)}, runs=5
    )
    return {
        "tensors": SMALL_TENSORS,
        "bytes_each": SMALL_ELEMENTS * 4,
        "save": [timing.row() for timing in saves.values()],
        "load": [timing.row() for timing in loads.values()],
        "save_ratio": round(saves["dcp"].median / saves["ours"].median, 1),
        "load_ratio": round(loads["dcp"].median / loads["ours"].median, 1),
    }


def forget(path: Path) -> None:
    """Drop files from the page cache."""
    for file in path.rglob("*"):
        if file.is_file():
            with file.open("rb") as opened:
                os.fsync(opened.fileno())
                os.posix_fadvise(opened.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def timed(action: Callable[[], object]) -> float:
    started = time.perf_counter()
    action()
    return time.perf_counter() - started


def _local_tier(disk: Path, memory: Path) -> dict[str, Any]:
    table = [Tensor("flat", (SETTINGS.elements * RANKS,), dict.fromkeys(STATES, "F32"))]
    tier = local_tier(memory, disk)
    path = save(disk, table, RANKS, tier=tier)
    times: dict[str, list[float]] = {"shared": [], "local": []}
    for _ in range(3):
        for name, where in (("shared", None), ("local", tier)):
            forget(path)
            times[name].append(timed(lambda where=where: _read(path, where)))  # type: ignore[misc]
    shared, local = (statistics.median(times[name]) for name in ("shared", "local"))
    shutil.rmtree(tier)
    return {
        "bytes": sum(file.stat().st_size for file in path.iterdir()),
        "shared_cold_s": round(shared, 2),
        "local_s": round(local, 2),
        "ratio": round(shared / local, 1),
    }


@contextmanager
def _place(parent: str | None) -> Any:
    with tempfile.TemporaryDirectory(dir=parent) as name:
        yield Path(name)


def run() -> None:
    """Measure and write results/checkpoint.json."""
    warnings.filterwarnings("ignore", message="torch.distributed is disabled")
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    figures: dict[str, Any] = {"torch": torch.__version__, "ranks": RANKS}
    with _place(None) as disk, _place("/dev/shm") as memory:
        figures["disk"] = _ranks(disk)
        figures["tmpfs"] = _ranks(memory)
        figures["small_tensors"] = {"disk": _small_tensors(disk / "s"), "tmpfs": _small_tensors(memory / "s")}
        figures["local_tier"] = _local_tier(disk / "tier", memory / "tier")
    write_result("checkpoint", figures)
