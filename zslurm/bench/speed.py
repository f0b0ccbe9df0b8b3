"""How fast each GPU and each node is, in seconds: what `zslurm doctor` compares nodes by.

    product       bf16 product of n x n matrices, n = 8192: TFLOPS of each rank
    memory        copy of 1 GiB: GB/s of each rank
    all_reduce    bus bandwidth of 64 MiB among the ranks of each node: GB/s of each node

Without GPUs the same code measures CPUs with small sizes; these figures mean little.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
import torch.distributed as dist

from zslurm.bench.collectives import bus_factor
from zslurm.bench.gemm import Product
from zslurm.bench.hbm import Pattern
from zslurm.bench.measurement import MeasurementPlan, Options, Point, Row
from zslurm.bench.ranks import BenchRanks
from zslurm.bench.result import MeasuredMachine
from zslurm.bench.run.local import rates_of_all
from zslurm.bench.run.timing import time_together

_SECONDS = 1.0
_MIB = 1 << 20


def points(options: Options, machine: MeasuredMachine) -> MeasurementPlan:
    """Return the three points; without the all-reduce if a node has one rank."""
    names = ["product", "memory", *(["all_reduce"] if machine.ranks_per_node > 1 else [])]
    return MeasurementPlan([Point({"what": name, **options}, 1.5 * _SECONDS) for name in names])


def run(point: Point, ranks: BenchRanks) -> Row | None:
    """Measure on all ranks at once; the row is rank 0's, with the figures of all."""
    on_gpu, device, group, wrong = ranks.on_gpu, ranks.device, None, 0
    call: Callable[[], object]
    n, copied, reduced = (8192, 1024 * _MIB, 64 * _MIB) if on_gpu else (512, 16 * _MIB, 4 * _MIB)
    what, seconds = point.values["what"], point.values.get("seconds", _SECONDS)
    if what == "product":
        sizes = {"product": "", "pass": "forward", "kind": "dense", "m": n, "n": n, "k": n, "batch": 1}
        product = Product({**sizes, "dtype": "bf16" if on_gpu else "fp32"}, device)
        call, work, size = product.call, 2 * n**3 / 1e12, n
    elif what == "memory":
        pattern = Pattern("copy", copied, torch.float32, device)
        call, work, size = pattern.call, pattern.moved / 1e9, copied
    else:
        first = ranks.node * ranks.local_size
        group = ranks.group(range(first, first + ranks.local_size))
        buffer = torch.ones(reduced // 4, device=device)
        call = partial(dist.all_reduce, buffer, dist.ReduceOp.MAX, group=group)
        work, size = bus_factor("all_reduce", ranks.local_size) * reduced / 1e9, reduced
    ranks.barrier()
    timing = time_together(call, group=group, device=device, seconds=seconds)
    if what != "all_reduce":
        wrong = (product if what == "product" else pattern).wrong()
    row = rates_of_all(work / timing.seconds, timing, ranks, "rate", wrong=wrong)
    return None if row is None else {"what": what, "unit": "TFLOPS" if what == "product" else "GB/s",
                                     "size": size, **row}  # fmt: skip
