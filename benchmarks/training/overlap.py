"""What reducing gradients during backward saves: a training step with `parallel.overlap` on against off.

Two ranks, one thread each, in the same processes with the same weights, turn by turn; a quarter of the larger
model, 33 million parameters in fp32, two microbatches a rank, buckets of 8 MiB, Muon and AdamW. Beside the step's
time, the time that reduce_gradients takes after the last backward: what is not hidden.

On CPUs gloo adds the numbers up on the cores that also compute, and its reduce-scatter does the work of an
all-reduce. Two ranks on two cores have nothing free to hide it behind: this shows the order of things, not what a
network card gains. With two GPUs or more it runs on them, over NCCL or RCCL, in bf16.
"""

from __future__ import annotations

import time
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.common import Timing, alternate, write_result
from benchmarks.models import LARGER
from tests.train.ranks import in_group
from zslurm.train.config import OptimConfig
from zslurm.train.model.zaya import build
from zslurm.train.optim.sharded import ShardedOptimizer
from zslurm.train.parallel.zero import ZeroShards
from zslurm.train.shapes import owned_table, parameter_counts

RANKS = 2
MODEL = LARGER.model_copy(update={"layers": 4, "experts": 8})
BUCKET_MB = 8.0
MICROBATCHES = 2
SEQUENCES, CONTEXT = 1, 256
RUNS = 6


class Step:
    """A training step of one rank, and how long its reductions kept it waiting."""

    def __init__(self, group: dist.ProcessGroup, device: torch.device) -> None:
        optim, dtype = OptimConfig(), torch.float32 if device.type == "cpu" else torch.bfloat16
        self.group, self.device = group, device
        self.model = build(MODEL, 1, dtype=dtype, device=device)
        table = owned_table(MODEL, optim)
        self.shards = ZeroShards(self.model, table, group, bucket_bytes=BUCKET_MB * 2**20)
        self.optimizer = ShardedOptimizer(self.shards, optim)
        generator = torch.Generator().manual_seed(dist.get_rank(group))
        self.tokens_BS = torch.randint(MODEL.vocab_size, (SEQUENCES, CONTEXT + 1), generator=generator).to(device)
        self.waited: dict[bool, list[float]] = {True: [], False: []}

    def run(self, overlap: bool) -> None:
        """One step; ranks begin together."""
        dist.barrier(self.group)
        self.shards.overlap = overlap
        self.shards.begin_step(backwards=MICROBATCHES)
        for _ in range(MICROBATCHES):
            loss, _ = self.model(self.tokens_BS[:, :-1], self.tokens_BS[:, 1:], rope_base=1e4)
            loss.backward()
        self._wait()
        started = time.perf_counter()
        self.shards.reduce_gradients()
        self._wait()
        self.waited[overlap].append(time.perf_counter() - started)
        self.shards.clip_gradients(1.0)
        self.optimizer.step(1e-4)
        self.shards.gather_weights()
        self._wait()

    def _wait(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)


def measured(group: dist.ProcessGroup, runs: int) -> dict[str, Any]:
    """This rank's times, and the bytes that it sent in a step."""
    on_gpu = torch.cuda.device_count() >= RANKS
    device = torch.device("cuda", dist.get_rank(group)) if on_gpu else torch.device("cpu")
    if on_gpu:
        torch.cuda.set_device(device)
        group = dist.new_group(backend="nccl")
    step = Step(group, device)
    timings = alternate({"on": lambda: step.run(True), "off": lambda: step.run(False)}, runs=runs)
    steps = 2 * (runs + 1)
    on, off = timings["on"], timings["off"]
    return {
        "device": torch.cuda.get_device_name(device) if on_gpu else "cpu",
        "step_ratio_off_to_on": round(off.median / on.median, 3),
        "step_ratio_of_fastest_runs": round(min(off.seconds) / min(on.seconds), 3),
        "reduction_left_after_backward_s": {
            name: round(Timing(name, step.waited[name == "on"][1:]).median, 4) for name in ("on", "off")
        },
        "sent_mib_per_step": {
            name: round(sent / steps / 2**20, 2) for name, sent in step.shards.comm.sent.items()
        },
        "timings": [timing.row() for timing in timings.values()],
    }


def run() -> None:
    """Measure and write results/overlap.json."""
    write_result(
        "overlap",
        {
            "torch": torch.__version__,
            "ranks": RANKS,
            "parameters": parameter_counts(MODEL).total,
            "bucket_mb": BUCKET_MB,
            "tokens_per_rank_and_step": MICROBATCHES * SEQUENCES * CONTEXT,
            "rank_0": in_group(measured, RANKS, RUNS)[0],
        },
    )
