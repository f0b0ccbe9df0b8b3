"""All GPUs at once on a stack of MLPs, forward and backward: what a cluster computes, and which GPU is slow.

Each of L layers is x + (relu(x A))^2 B with A of D x F and B of F x D, in bf16 on GPUs; the gradient of the last
layer's output is drawn once, as weights and tokens are. Nothing is communicated: every GPU has its stack and its
tokens, and all compute at the same time, at the power and temperature that this brings. FLOPs are of the
matrix products,

    12 L T D F      for T tokens: 2 of 2 T D F forward, and twice as many backward

AMD reports more than 750 PFLOPS of such a stack on 1,024 MI300X (arXiv 2511.17127's cluster), 732 TFLOPS for each
GPU; its sizes are not published. Ours take about 40 GB: L 8, D 8192, F 32768, T 16384. On CPUs the figures are of
small fp32 layers, and are no measure of a GPU.

The ranks are timed at the same moments, and compared with each other moment by moment (peers.py): on GPUs by the
clock, on CPUs by the processor time of each, for ranks that share cores are slowed by each other. `slower` is the
share by which a rank is slower than its peers, 0 if it is not; `visible` is the least that would be seen.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from zslurm.bench.measurement import MeasurementPlan, Options, Point, Row
from zslurm.bench.ranks import BenchRanks
from zslurm.bench.result import MeasuredMachine, Skipped
from zslurm.bench.results.peers import compare_peers
from zslurm.bench.run.local import name_of, time_at_once
from zslurm.bench.run.timing import summarize
from zslurm.checkpoint_tools.quantities import show_bytes
from zslurm.train.parallel.world import DTYPES

DEFAULTS = {
    "cuda": {"layers": 8, "hidden": 8192, "inner": 32768, "tokens": 16384, "dtype": "bf16"},
    "cpu": {"layers": 2, "hidden": 256, "inner": 1024, "tokens": 256, "dtype": "fp32"},
}
"""Sizes if the user names none."""

_MOMENTS = 40
_MOMENT_S = 0.25
_GUESS = {"cuda": 3e14, "cpu": 2e10}


def points(options: Options, machine: MeasuredMachine) -> MeasurementPlan:
    """Return the one point, unless it does not fit into memory or the device lacks its format."""
    values = {**DEFAULTS[machine.device], **{name: value for name, value in options.items() if value is not None}}
    moments, moment_s = values.pop("moments", _MOMENTS), values.pop("moment_s", _MOMENT_S)
    needed = memory(values)
    reason = ""
    if machine.device == "cuda" and values["dtype"] == "bf16" and not torch.cuda.is_bf16_supported():
        reason = f"{machine.gpu} has no bf16"
    elif needed > 0.95 * machine.gpu_memory:
        reason = f"it takes {show_bytes(needed)} for each rank, of {show_bytes(machine.gpu_memory)} that are free"
    if reason:
        return MeasurementPlan([], [Skipped(point=values, reason=reason)])
    step = flops(values) / _GUESS[machine.device]
    seconds = 2 * step + moments * max(moment_s, step)
    return MeasurementPlan([Point({**values, "moments": moments, "moment_s": moment_s}, seconds)])


def flops(values: dict[str, Any]) -> float:
    """Return the FLOPs of a step's matrix products on one rank."""
    return float(12 * values["layers"] * values["tokens"] * values["hidden"] * values["inner"])


def memory(values: dict[str, Any]) -> int:
    """Return the bytes that a step takes: weights, their gradients, and what each layer keeps for backward."""
    hidden, inner = values["hidden"], values["inner"]
    weights = 2 * values["layers"] * hidden * inner
    # Kept: a layer's input, what is behind A, and its square; and again while a layer goes backward.
    kept = (values["layers"] + 1) * values["tokens"] * (hidden + 2 * inner)
    return int((2 * weights + kept) * DTYPES[values["dtype"]].itemsize)


def run(point: Point, ranks: BenchRanks) -> list[Row]:
    """Measure the stack on all ranks at once; returns a row for each rank, on rank 0."""
    values = dict(point.values)
    moments, moment_s = values.pop("moments"), values.pop("moment_s")
    stack = Stack(values, ranks.device)
    times = time_at_once(stack.step, ranks, moments=moments, moment_s=moment_s)
    gathered = ranks.gather([times.wall_s, times.own_s, stack.wrong()])
    if gathered is None:
        return []
    own_s = {name_of(ranks, rank): seconds_of_rank for rank, (_, seconds_of_rank, _) in enumerate(gathered)}
    comparison = compare_peers(own_s, better="lower")
    slow = {peer.name: peer.share for peer in comparison.slow}
    rows: list[Row] = []
    for rank, (wall, _, wrong) in enumerate(gathered):
        timing = summarize(wall)
        rows.append({
            **values,
            "rank": rank,
            "node": ranks.nodes[rank // ranks.local_size],
            "where": name_of(ranks, rank),
            "seconds": timing.seconds,
            "spread": timing.spread,
            "samples": timing.samples,
            "tflops": flops(values) / timing.seconds / 1e12,
            "slower": 1 - slow[name_of(ranks, rank)] if name_of(ranks, rank) in slow else 0.0,
            "visible": comparison.visible,
            "moments_s": own_s[name_of(ranks, rank)],
            "wrong": wrong,
        })  # fmt: skip
    return rows


class Stack:
    """One rank's layers and tokens."""

    def __init__(self, values: dict[str, Any], device: torch.device) -> None:
        dtype, hidden, inner = DTYPES[values["dtype"]], values["hidden"], values["inner"]
        generator = torch.Generator(device).manual_seed(0)

        def drawn(rows: int, columns: int, deviation: float) -> Tensor:
            values = torch.randn(rows, columns, dtype=dtype, device=device, generator=generator)
            return values.mul_(deviation)

        self.x = drawn(values["tokens"], hidden, 1.0).requires_grad_()
        self.weights = [
            (
                drawn(hidden, inner, hidden**-0.5).requires_grad_(),
                drawn(inner, hidden, inner**-0.5).requires_grad_(),
            )
            for _ in range(values["layers"])
        ]
        self.gradient = drawn(values["tokens"], hidden, 1.0)
        self.out = self.first = self.x.detach()

    def step(self) -> None:
        """Go forward and backward once."""
        x = self.x
        for up, down in self.weights:
            x = x + torch.relu(x @ up).square() @ down
        leaves = [self.x, *(weight for pair in self.weights for weight in pair)]
        self.first = torch.autograd.grad(x, leaves, self.gradient)[0]
        self.out = x.detach()

    def wrong(self) -> int:
        """Return how many rows of the last output, and of the gradient of the first input, are no numbers."""
        return sum(int((~output.isfinite().all(dim=1)).sum()) for output in (self.out, self.first))
