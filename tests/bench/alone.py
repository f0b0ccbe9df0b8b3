"""One rank by itself, in this process."""

from __future__ import annotations

from datetime import timedelta

import torch
import torch.distributed as dist

from zslurm.bench.ranks import BenchRanks
from zslurm.bench.result import MeasuredMachine

MACHINE = MeasuredMachine(
    cluster="local", nodes=["n0"], ranks_per_node=1, device="cpu", gpu=None, gpus_per_node=0, gpu_memory=1 << 30,
    cpu="a CPU", cores=1,
)  # fmt: skip


def alone() -> BenchRanks:
    """Return the ranks of a benchmark with one of them."""
    return BenchRanks(
        rank=0, local_rank=0, local_size=1, nodes=["n0"], device=torch.device("cpu"), store=dist.HashStore(),
        timeout=timedelta(seconds=60),
    )  # fmt: skip
