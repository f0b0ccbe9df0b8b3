"""`zslurm bench collectives`: its bus bandwidth beside an independent one, and a slow rank that it must name.

Bus bandwidth: in processes of two ranks, gloo between them, the benchmark's own measurement takes turns with a
plain loop over torch.distributed, whose formula is written out here again. Turns are short, a tenth of a second,
so that what drifts hits both; each turn's figure is divided by the mean of the plain loop's before and after it,
and the figure is the median of these ratios, with its standard error. Slow rank: whole runs of the command with
one of four ranks at 0.8 of the others' rate (slowed_python.py), in turn with as many runs without. Both need a
machine on which little else runs: its load is recorded. What the comparison of peers can see is drawn in
slow_peers.py.
"""

from __future__ import annotations

import json
import math
import os
import shlex
import statistics
import subprocess
import sys
import tempfile
import time
from datetime import timedelta
from itertools import pairwise
from pathlib import Path
from typing import Any

from benchmarks.common import ROOT, write_result

RANKS = 2
SIZES = (64 << 10, 4 << 20)
OPERATIONS = ("all_reduce", "reduce_scatter", "all_gather", "broadcast")
TURNS = 11
RUNS = 10
_TURN_S = 0.2
_RUN_LIMIT_S = 300


def run(runs: int = RUNS, turns: int = TURNS) -> None:
    """Measure and write results/bench_collectives.json."""
    load = os.getloadavg()[0]
    bandwidth = _bandwidth(turns)
    named, healthy = [], []
    for index in range(runs):
        named.append(_slow_run(rank=index % 4))
        healthy.append(_slow_run(rank=None))
        _progress(f"run {index + 1} of {runs}: slowed {named[-1]['slow']}, named {named[-1]['named']}; "
                  f"with none slowed, named {healthy[-1]['named']}")  # fmt: skip
    write_result(
        "bench_collectives",
        {
            "load_at_the_start": round(load, 2),
            "bus_bandwidth_over_an_independent_one": bandwidth,
            "slow_rank": {
                "rate": 0.8,
                "runs": runs,
                "named_alone": sum(each["named"] == [each["slow"]] for each in named),
                "healthy_runs": runs,
                "named_in_healthy_runs": sum(bool(each["named"]) for each in healthy),
                "findings": [each["findings"] for each in (*named, *healthy)],
            },
        },
    )


def _progress(line: str) -> None:
    print(f"bench_collectives: {line}", file=sys.stderr, flush=True)


def _bandwidth(turns: int) -> list[dict[str, Any]]:
    with tempfile.TemporaryDirectory() as folder:
        ranks = [
            subprocess.Popen(
                [sys.executable, "-m", "benchmarks.measurements.bench_collectives", folder, str(rank), str(turns)],
                cwd=ROOT, stdout=subprocess.PIPE, text=True,
            )
            for rank in range(RANKS)
        ]  # fmt: skip
        out = [rank.communicate()[0] for rank in ranks]
        if any(rank.returncode for rank in ranks):
            raise SystemExit("a rank failed")
    rows: list[dict[str, Any]] = json.loads(out[0].splitlines()[-1])
    return rows


def _rank(folder: Path, rank: int, turns: int) -> None:
    import torch
    import torch.distributed as dist

    from zslurm.bench import collectives
    from zslurm.bench.measurement import Point
    from zslurm.bench.ranks import Ranks

    collectives._POINT_S = _TURN_S
    torch.set_num_threads(1)
    timeout = timedelta(seconds=300)
    store = dist.FileStore(str(folder / "store"), RANKS)
    dist.init_process_group("gloo", store=dist.PrefixStore("groups", store), rank=rank, world_size=RANKS)
    ranks = Ranks(
        rank=rank, local_rank=rank, local_size=RANKS, nodes=["here"], device=torch.device("cpu"),
        store=dist.PrefixStore("control", store), timeout=timeout,
    )  # fmt: skip
    rows = []
    for operation in OPERATIONS:
        for size in SIZES:
            values = {"operation": operation, "scope": "node", "nodes": 1, "ranks": RANKS, "levels": "flat"}
            point = Point({**values, "bytes": size}, 1.0)
            ours, plains = [], [plain(operation, size)]
            for _ in range(turns):
                measured = collectives.run(point, ranks)
                ours += [each["busbw_gb_s"] for each in measured]
                plains.append(plain(operation, size))
            if rank == 0:
                rows.append(_row(operation, size, ours, plains))
                _progress(f"{operation} of {size} bytes: {rows[-1]['ratio']} of the independent loop's")
    if rank == 0:
        print(json.dumps(rows))
    dist.barrier()


def _row(operation: str, size: int, ours: list[float], plains: list[float]) -> dict[str, Any]:
    ratios = [mine / statistics.mean(two) for mine, two in zip(ours, pairwise(plains), strict=True)]
    middle = statistics.median(ratios)
    deviation = 1.4826 * statistics.median(abs(ratio - middle) for ratio in ratios)
    return {
        "operation": operation,
        "bytes": size,
        "ratio": round(middle, 3),
        "standard_error": round(deviation * math.sqrt(math.pi / 2 / len(ratios)), 3),
        "turns": len(ratios),
        "busbw_gb_s": round(statistics.median(ours), 4),
    }


def plain(operation: str, size: int) -> float:
    """Return the bus bandwidth in GB/s by a plain loop: no code of zslurm's."""
    import torch
    import torch.distributed as dist

    n = dist.get_world_size()
    whole, part = torch.ones(size // 4), torch.ones(size // 4 // n)

    # Newer versions of torch have other names for them.
    scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
    gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor

    def call() -> None:
        if operation == "all_reduce":
            dist.all_reduce(whole)
        elif operation == "reduce_scatter":
            scatter(part, whole)
        elif operation == "all_gather":
            gather(whole, part)
        else:
            dist.broadcast(whole, 0)

    for _ in range(5):
        call()
    dist.barrier()
    began = time.perf_counter()
    call()
    once = torch.tensor([time.perf_counter() - began])
    dist.all_reduce(once, dist.ReduceOp.MAX)
    loops, times = 0, []
    # Batches, and the median of them: other programs on this machine disturb single ones.
    batch = max(1, int(0.02 / once.item()))
    while loops < 5 or loops * batch * once.item() < _TURN_S:
        whole.fill_(1.0)
        dist.barrier()
        began = time.perf_counter()
        for _ in range(batch):
            call()
        seconds = torch.tensor([time.perf_counter() - began], dtype=torch.float64)
        dist.all_reduce(seconds, dist.ReduceOp.MAX)
        times.append(seconds.item() / batch)
        loops += 1
    factor = {"all_reduce": 2 * (n - 1) / n, "broadcast": 1.0}.get(operation, (n - 1) / n)
    return size / statistics.median(times) / 1e9 * factor


def _slow_run(rank: int | None) -> dict[str, Any]:
    """Run the command with four ranks, one of them slow; return whom it named."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "result.json"
        environ = dict(os.environ)
        if rank is not None:
            program = Path(folder) / "python"
            words = shlex.join([sys.executable, str(Path(__file__).with_name("slowed_python.py"))])
            program.write_text(f"#!/bin/sh\nexec {words}\n")
            program.chmod(0o755)
            environ |= {
                "ZSLURM_BENCH_PYTHON": str(program),
                "ZSLURM_SLOW_RANK": str(rank),
                "ZSLURM_SLOW_RATE": "0.8",
                "PYTHONPATH": str(ROOT),
            }
        words = ["bench", "collectives", "--ranks", "4", "--scope", "gpu_pair", "--out", str(out)]
        subprocess.run(
            [sys.executable, "-m", "zslurm", *words], cwd=ROOT, env=environ, check=True, stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL, timeout=_RUN_LIMIT_S,
        )  # fmt: skip
        result = json.loads(out.read_text())
    named = [int(name.rpartition(" ")[2]) for name in result["slow"]]
    return {"slow": rank, "named": named, "findings": result["findings"]}


if __name__ == "__main__":
    _rank(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))
