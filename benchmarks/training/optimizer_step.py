"""The whole optimizer step, Muon and AdamW, against torch's own optimizers on the same tensors.

Peer: torch.optim.Muon (which takes one matrix at a time) and torch.optim.AdamW(foreach=True), with the same
settings, in the same process, turn by turn with ours: `ShardedOptimizer` as the trainer runs it on one rank. Both
update fp32 masters from fp32 gradients, with five Newton-Schulz steps in bf16; after the first step they are
compared, element by element.

Models: the tiny recipe; one of 108.8 million parameters, whose experts are 1024 x 512; and 4 of the 15 layers of
zaya1-400m, 1536 x 768, with as much of its embedding (the tensors of both have to fit into 24 GB). On a CPU with
one thread and with all cores, and on a GPU where there is one. The optimizer's share of a training step is that of
the tiny recipe: four microbatches of 4 x 256 tokens forward and backward, then the update and the collecting of
weights.
"""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from benchmarks.common import alternate, ratio, write_result
from benchmarks.models import LARGER, TINY, part_of_400m
from zslurm.train.config import ModelConfig, OptimConfig
from zslurm.train.model.zaya import Zaya, build
from zslurm.train.optim.sharded import ShardedOptimizer
from zslurm.train.parallel.zero import ZeroShards
from zslurm.train.shapes import TensorInfo, owned_table

MODELS = {  # and how often each is timed
    "tiny": (TINY, 20),
    "larger": (LARGER, 5),
    "4/15 of zaya1-400m": (part_of_400m(), 5),
}
CONFIG = OptimConfig()
LR = 1e-3
SHARE_STEPS = 8


@contextmanager
def one_rank(device: str) -> Iterator[dist.ProcessGroup]:
    """A group of this process alone."""
    backend = "nccl" if device == "cuda" else "gloo"
    dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
    assert dist.group.WORLD is not None
    yield dist.group.WORLD
    dist.destroy_process_group()


class Ours:
    """A model of this project with its sharded optimizer."""

    def __init__(self, model: ModelConfig, group: dist.ProcessGroup, device: str) -> None:
        self.table = owned_table(model, CONFIG)
        self.model = build(model, 1, dtype=torch.float32, device=device)
        self.shards = ZeroShards(self.model, self.table, group)
        self.optimizer = ShardedOptimizer(self.shards, CONFIG)
        self.shards.master_gradient.normal_(generator=torch.Generator(device).manual_seed(0))

    def step(self) -> None:
        self.optimizer.step(LR)

    def pieces(self, chunk: Tensor) -> Iterator[tuple[TensorInfo, Tensor]]:
        """The tensors of a chunk, those of matrices one by one, and the rows they belong to."""
        rows = {row.name: row for row in self.table}
        for extent in self.shards.extents:
            row = rows[extent.tensor]
            yield row, chunk[extent.in_chunk].view(row.shape[-2:] if row.whole else row.shape)


class Torchs:
    """torch's optimizers on copies of the same tensors."""

    def __init__(self, ours: Ours) -> None:
        self.parameters: list[nn.Parameter] = []
        matrices: list[Tensor] = []
        decayed: list[Tensor] = []
        vectors: list[Tensor] = []
        pairs = zip(ours.pieces(ours.shards.master), ours.pieces(ours.shards.master_gradient), strict=True)
        for (row, master), (_, gradient) in pairs:
            parameter = nn.Parameter(master.clone())
            parameter.grad = gradient.clone()
            self.parameters.append(parameter)
            (matrices if row.whole else decayed if row.decay else vectors).append(parameter)
        self.muon = torch.optim.Muon(
            matrices,
            lr=LR,
            weight_decay=CONFIG.weight_decay,
            momentum=CONFIG.muon.momentum,
            nesterov=CONFIG.muon.nesterov,
            ns_steps=CONFIG.muon.steps,
            adjust_lr_fn=CONFIG.muon.scale,
        )
        groups: list[dict[str, Any]] = [{"params": decayed}, {"params": vectors, "weight_decay": 0.0}]
        self.adamw = torch.optim.AdamW(
            groups,
            lr=LR,
            betas=CONFIG.betas,
            eps=CONFIG.eps,
            weight_decay=CONFIG.weight_decay,
            foreach=True,
        )

    def step(self) -> None:
        self.muon.step()  # type: ignore[no-untyped-call]
        self.adamw.step()


def _largest_difference(ours: Ours, torchs: Torchs) -> float:
    pieces = zip(ours.pieces(ours.shards.master), torchs.parameters, strict=True)
    return max((piece - parameter.detach()).abs().max().item() for (_, piece), parameter in pieces)


def _measure(name: str, device: str, threads: int) -> dict[str, Any]:
    model, runs = MODELS[name]
    torch.set_num_threads(threads)
    with one_rank(device) as group:
        ours = Ours(model, group, device)
        torchs = Torchs(ours)
        ours.step()
        torchs.step()
        difference = _largest_difference(ours, torchs)
        timings = alternate({"ours": _waited(ours.step, device), "torch": _waited(torchs.step, device)}, runs=runs)
        muon_alone = alternate({"torch's Muon": _waited(torchs.muon.step, device)}, runs=3)["torch's Muon"]
    return {
        "model": name,
        "parameters": sum(row.numel for row in ours.table),
        "matrices": len(torchs.muon.param_groups[0]["params"]),
        "device": torch.cuda.get_device_name() if device == "cuda" else "cpu",
        "threads": threads,
        "speed_ratio": ratio(timings["torch"], timings["ours"]),
        "speed_ratio_of_fastest_runs": round(min(timings["torch"].seconds) / min(timings["ours"].seconds), 2),
        "share_of_muon_in_torch": round(muon_alone.median / timings["torch"].median, 3),
        "largest_difference_after_one_step": difference,
        "timings": [timing.row() for timing in timings.values()],
    }


def _waited(step: Callable[[], object], device: str) -> Callable[[], None]:
    def run() -> None:
        step()
        if device == "cuda":
            torch.cuda.synchronize()

    return run


def _share_of_training(threads: int) -> dict[str, Any]:
    """Where the time of a training step of the tiny recipe goes, on one rank."""
    torch.set_num_threads(threads)
    model, batch, context, microbatches = TINY, 4, 256, 4
    parts: dict[str, list[float]] = {"forward_backward": [], "optimizer": []}
    with one_rank("cpu") as group:
        ours = Ours(model, group, "cpu")
        tokens_BS = torch.randint(model.vocab_size, (batch, context + 1))
        for _ in range(SHARE_STEPS):
            started = time.perf_counter()
            ours.shards.begin_step(backwards=microbatches)
            for _ in range(microbatches):
                _loss(ours.model, tokens_BS).backward()  # type: ignore[no-untyped-call]
            ours.shards.reduce_gradients()
            ours.shards.clip_gradients(CONFIG.clip_norm)
            between = time.perf_counter()
            ours.step()
            ours.shards.gather_weights()
            parts["forward_backward"].append(between - started)
            parts["optimizer"].append(time.perf_counter() - between)
    medians = {name: statistics.median(seconds) for name, seconds in parts.items()}
    return {
        "model": "tiny",
        "threads": threads,
        "tokens": batch * context * microbatches,
        **{f"{name}_s": round(seconds, 4) for name, seconds in medians.items()},
        "optimizer_share": round(medians["optimizer"] / sum(medians.values()), 3),
    }


def _loss(model: Zaya, tokens_BS: Tensor) -> Tensor:
    loss: Tensor = model(tokens_BS[:, :-1], tokens_BS[:, 1:], rope_base=1e4)[0] / tokens_BS.numel()
    return loss


def run() -> None:
    """Measure and write results/optimizer_step.json."""
    threads = sorted({1, len(os.sched_getaffinity(0))})
    measured = [_measure(name, "cpu", count) for name in MODELS for count in threads]
    if torch.cuda.is_available():
        measured += [_measure(name, "cuda", threads[-1]) for name in MODELS]
    write_result(
        "optimizer_step",
        {
            "torch": torch.__version__,
            "steps": measured,
            "training_step": [_share_of_training(count) for count in threads],
        },
    )
