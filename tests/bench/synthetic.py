"""Results of benchmarks as `zslurm bench` writes them, with synthetic figures."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

from zslurm.bench.result import BenchResult, MeasuredMachine

Row = dict[str, Any]


def result(benchmark: str, rows: list[Row], **changes: Any) -> BenchResult:
    machine = {
        "cluster": "ours", "nodes": ["n0", "n1", "n2", "n3"], "ranks_per_node": 8, "device": "cuda",
        "gpu": "AMD Instinct MI300X", "gpus_per_node": 8, "gpu_memory": 10**11, "cpu": "EPYC", "cores": 96,
    } | changes.pop("machine", {})  # fmt: skip
    fields: dict[str, Any] = {
        "benchmark": benchmark,
        "command": ["zslurm", "bench", benchmark],
        "machine": MeasuredMachine(**machine),
        "versions": {"torch": "2.10.0"},
        "environment": {},
        "date": "2026-11-23T16:00:00Z",
        "options": {},
        "rows": rows,
        "complete": True,
    }
    return BenchResult(**(fields | changes))


def write(path: Path, found: BenchResult) -> Path:
    path.write_text(json.dumps(found.model_dump(mode="json")))
    return path


def collective(
    nodes: int,
    latency_s: float,
    rate: float,
    *,
    levels: str = "flat",
    noise: float = 0.0,
    seed: int = 0,
    **changes: Any,
) -> list[Row]:
    """A reduce_scatter over all ranks, 1 KiB to 16 GiB: latency + bytes / rate, with noise."""
    draw = random.Random(seed)
    rows = []
    for power in range(10, 35):
        size = 2**power
        seconds = (latency_s + size / rate) * (1 + noise * draw.gauss(0, 1))
        row: Row = {
            "operation": "reduce_scatter",
            "scope": "node" if nodes == 1 else "all",
            "where": "all",
            "nodes": nodes,
            "ranks": 8 * nodes,
            "levels": levels,
            "bytes": size,
            "seconds": seconds,
            "spread": 0.01,
            "samples": 20,
            "us": seconds * 1e6,
            "algbw_gb_s": size / seconds / 1e9,
            "busbw_gb_s": size / seconds / 1e9,
            "wrong": 0,
        }
        rows.append(row | changes)
    return rows
