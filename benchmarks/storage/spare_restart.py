"""Load a checkpoint on a spare node: warmed by its agent, and cold.

A checkpoint of 8 ranks is loaded as a node of two ranks, which read at the same time, loads its part of it; four
such nodes one after the other, so every shard is read. They read through `Checkpoint.read`, which compares every
block with its checksum. Before each load all files are put out of the page cache (posix_fadvise), and mincore
confirms that none of their pages is left; for the warmed load the agent's `SpareWarmer` reads the newest
checkpoint before, and what it takes is stated beside.

It is the load alone: not the start of processes, nor of a process group. A spare is idle, and the machine of the
measurement need not be: `unloaded` is the time by the clock less the time that the ranks waited for a processor
while others had it (/proc/thread-self/schedstat), for the slowest rank of each node.
"""

from __future__ import annotations

import json
import os
import tempfile
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np

from benchmarks.common import ROOT, Timing, ratio, write_result
from zslurm.aegis.agent.sensor import NodeContext
from zslurm.aegis.agent.spare_warmer import SpareWarmer
from zslurm.checkpoint_tools import Checkpoint, Entry, Tensor, assemble, begin, commit, write_shard
from zslurm.config.spec import ClusterSection
from zslurm.hardware.page_cache import drop, resident
from zslurm.run.run_dir import RunDir

RANKS, RANKS_PER_NODE, TENSORS, RUNS = 8, 2, 32, 7
ELEMENTS = 1 << 21
"""Of each rank's part of a tensor: 8 MiB, and 2 GiB in all."""


def save(root: Path) -> Path:
    """Write the checkpoint."""
    directory = begin(root, 400, "bench")
    reports = []
    for rank in range(RANKS):
        values = np.random.default_rng(rank).random(ELEMENTS, np.float32)
        start, stop = rank * ELEMENTS, (rank + 1) * ELEMENTS
        entries = [Entry(f"tensor.{index}", "master", start, stop, values) for index in range(TENSORS)]
        reports.append(write_shard(directory, rank, RANKS, entries))
    tensors = [Tensor(f"tensor.{index}", (ELEMENTS * RANKS,), {"master": "F32"}) for index in range(TENSORS)]
    return commit(
        root, directory, assemble(reports, step=400, tokens=0, model={}, cursor={}, state={}, tensors=tensors)
    )


def waited_s() -> float:
    """Seconds that this thread was ready to run and had no processor."""
    return int(Path("/proc/thread-self/schedstat").read_text().split()[1]) / 1e9


def load(path: Path) -> tuple[float, float]:
    """Read what every rank would, with all checksums; returns the seconds by the clock, and unloaded."""
    outs = [np.zeros(ELEMENTS, np.float32) for _ in range(RANKS_PER_NODE)]

    def load_rank(rank: int) -> float:
        began, before = time.perf_counter(), waited_s()
        with Checkpoint.open(path) as checkpoint:
            for tensor in checkpoint.tensors:
                start, stop = rank * ELEMENTS, (rank + 1) * ELEMENTS
                checkpoint.read(tensor, "master", start, stop, outs[rank % RANKS_PER_NODE])
        return time.perf_counter() - began - (waited_s() - before)

    unloaded, began = 0.0, time.perf_counter()
    with ThreadPoolExecutor(RANKS_PER_NODE) as ranks:
        for first in range(0, RANKS, RANKS_PER_NODE):
            unloaded += max(ranks.map(load_rank, range(first, first + RANKS_PER_NODE)))
    return time.perf_counter() - began, unloaded


def cool(path: Path) -> None:
    """Put the checkpoint out of the page cache, and make sure of it."""
    for file in path.iterdir():
        drop(file)
    left = sum(resident(file) for file in path.iterdir())
    assert not left, f"{left} bytes are still in the page cache: the file system is in memory, or others read it"


def run() -> None:
    """Measure and write the result."""
    times: dict[str, list[tuple[float, float]]] = {"cold": [], "warmed": []}
    warming: list[float] = []
    with tempfile.TemporaryDirectory(dir=ROOT) as place:
        run_dir = RunDir(Path(place) / "run")
        attempt = run_dir.attempt(1)
        attempt.path.mkdir(parents=True)
        attempt.description.write_text(json.dumps({"nodes": "node[1-4]"}))
        run_dir.checkpoints.mkdir()
        path = save(run_dir.checkpoints)
        size = sum(file.stat().st_size for file in path.iterdir())
        context = NodeContext("node5", run_dir, cluster=ClusterSection(launcher="slurm"))
        for _ in range(RUNS):
            cool(path)
            times["cold"].append(load(path))
            cool(path)
            warmed = SpareWarmer(context, lambda: 1, threading.Event(), lambda done: None).look()
            assert warmed is not None and warmed.bytes == size, "the warmer did not read the whole checkpoint"
            warming.append(warmed.seconds)
            times["warmed"].append(load(path))
    cold, warm = (Timing(name, [clock for clock, _ in both]) for name, both in times.items())
    alone = {name: Timing(f"{name}, unloaded", [seconds for _, seconds in both]) for name, both in times.items()}
    write_result(
        "spare_restart",
        {
            "checkpoint_bytes": size,
            "ranks": RANKS,
            "ranks_per_node": RANKS_PER_NODE,
            "load_average": round(os.getloadavg()[0], 1),
            "rows": [
                each.row() for each in (cold, warm, *alone.values(), Timing("warming, beside the run", warming))
            ],
            "cold_over_warmed": ratio(cold, warm),
            "cold_over_warmed_unloaded": ratio(alone["cold"], alone["warmed"]),
        },
    )
