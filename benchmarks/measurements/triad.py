"""The triad of `zslurm bench hbm` against a plain loop of torch, in turn, in this process.

Peer: `for _ in range(n): torch.add(b, c, alpha=s, out=a)` between two readings of the clock, over arrays of the
same size and format, on one thread. Both take turns, in processor time, for the cores are shared with others;
compared are the medians of all turns, and the fastest turn of each.
"""

from __future__ import annotations

import statistics
import time
from datetime import timedelta
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist

from benchmarks.common import write_result
from zslurm.bench.hbm import SCALAR, Pattern
from zslurm.bench.ranks import Ranks
from zslurm.bench.run.local import time_alone

SIZES = (1 << 20, 8 << 20, 64 << 20)
TURNS = 15
_LOOP_S = 0.06


def run() -> None:
    """Measure and write results/triad.json."""
    torch.set_num_threads(1)
    ranks = Ranks(
        rank=0, local_rank=0, local_size=1, nodes=["n0"], device=torch.device("cpu"), store=dist.HashStore(),
        timeout=timedelta(seconds=60),
    )  # fmt: skip
    with mock.patch("time.perf_counter", time.process_time):
        sizes = [_row(size, ranks) for size in SIZES]
    about = {"threads": 1, "torch": torch.__version__, "clock": "processor time"}
    write_result("triad", {**about, "sizes": sizes})


def _row(size: int, ranks: Ranks) -> dict[str, Any]:
    pattern = Pattern("triad", size, torch.float64, ranks.device)
    a, b, c = (torch.full((size // 8,), value, dtype=torch.float64) for value in (0.1, 0.2, 0.3))
    _loop(a, b, c, 3)
    calls = max(1, round(_LOOP_S / _loop(a, b, c, 3)))
    ours, plain = [], []
    for _ in range(TURNS):
        ours.append(pattern.moved / time_alone(pattern.call, ranks, _LOOP_S).seconds / 1e9)
        plain.append(3 * size / _loop(a, b, c, calls) / 1e9)
    ratios = [mine / theirs for mine, theirs in zip(ours, plain, strict=True)]
    return {
        "bytes": size,
        "ours_gb_s": round(statistics.median(ours), 2),
        "plain_gb_s": round(statistics.median(plain), 2),
        "ratio": round(statistics.median(ours) / statistics.median(plain), 3),
        "ratio_of_the_best": round(max(ours) / max(plain), 3),
        "turns": TURNS,
        "ratios_of_turns": [round(ratio, 3) for ratio in ratios],
    }


def _loop(a: torch.Tensor, b: torch.Tensor, c: torch.Tensor, calls: int) -> float:
    began = time.perf_counter()
    for _ in range(calls):
        torch.add(b, c, alpha=SCALAR, out=a)
    return (time.perf_counter() - began) / calls
