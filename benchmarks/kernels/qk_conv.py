"""Queries and keys of ZAYA1's heads on a GPU: the kernels against torch's functions, in microseconds.

Forward and backward of one layer's step from projections to queries and keys, for the recipes' heads and for
decoding. Joining the two convolutions is part of each. On a machine without a GPU nothing is measured.

`share_of_copy` is what the forward moves at least (projections in, queries and keys out, the mixed form kept), by
its time, over the rate of a copy measured beside it.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import partial
from statistics import median
from typing import Any

import torch
from torch import Tensor

from benchmarks.common import write_result
from zslurm.kernels.dispatch import using
from zslurm.kernels.qk_conv import Convolutions, join, qk_conv

WAYS = ("torch", "triton")
HEADS = {"zaya1-8b": (8, 2), "zaya1-3b": (6, 2), "zaya1-1b": (4, 1)}
"""Query and key heads of 128 channels."""
TOKENS = ((8, 4096), (1, 32768), (64, 1))
"""Sequences and their tokens; one token each is a step of decoding."""
HEAD_DIM, PAIRS = 128, 32
RUNS, WARM_UP = 30, 5


def run() -> None:
    """Measure and write results/qk_conv.json; without a GPU print that nothing was measured."""
    if not torch.cuda.is_available():
        print("qk_conv: no GPU is here, nothing was measured", file=sys.stderr)
        return
    rows = [_compare(model, *sizes) for model in HEADS for sizes in TOKENS]
    write_result(
        "qk_conv",
        {"torch": torch.__version__, "card": torch.cuda.get_device_name(), "dtype": "bfloat16", "rows": rows},
    )


def _compare(model: str, batch: int, length: int) -> dict[str, Any]:
    forward, both, moved = _calls(HEADS[model], batch, length)
    row: dict[str, Any] = {"model": model, "batch": batch, "length": length}
    for way in WAYS:
        with using("qk_conv", way):
            row[f"{way}_forward_us"] = _microseconds(forward)
            if length > 1:
                row[f"{way}_forward_and_backward_us"] = _microseconds(both)
    row["forward_speedup"] = round(row["torch_forward_us"] / row["triton_forward_us"], 2)
    if length > 1:
        rate = moved / row["triton_forward_us"]
        row["share_of_copy"] = round(rate / _copy_rate(), 2)
        row["speedup"] = round(row["torch_forward_and_backward_us"] / row["triton_forward_and_backward_us"], 2)
    return row


def _calls(heads: tuple[int, int], batch: int, length: int) -> tuple[Callable[[], Any], Callable[[], Any], int]:
    """Return the forward, both passes, and how many bytes the forward moves at least."""
    torch.manual_seed(0)
    queries, keys = heads
    channels = (queries + keys) * HEAD_DIM
    random = partial(torch.randn, device="cuda", dtype=torch.bfloat16)
    wide_BSQ = random(batch, length, channels + keys * HEAD_DIM)  # with the values, as one product gives them
    leaves = [wide_BSQ, random(channels, 1, 2), random(channels), random(channels, HEAD_DIM, 2), random(channels)]
    temperature_J = random(keys)
    angles = torch.rand(length, PAIRS, device="cuda")
    gradients = random(batch, queries, length, HEAD_DIM), random(batch, keys, length, HEAD_DIM)
    for leaf in (*leaves, temperature_J):
        leaf.requires_grad_(length > 1)
    z_BSQ = wide_BSQ[:, :, :channels]
    decoding = {"before_BWQ": random(batch, 2, channels)} if length == 1 else {}

    def forward() -> tuple[Tensor, Tensor]:
        kernel: Any = Convolutions(*leaves[1:])
        kernel = join(kernel) if length == 1 else kernel
        return qk_conv(z_BSQ, kernel, temperature_J, angles.cos(), angles.sin(), **decoding)

    def both() -> None:
        torch.autograd.grad(forward(), [*leaves, temperature_J], gradients)

    return forward, both, batch * length * channels * (2 + 2 + 4 * (length > 1))


def _microseconds(call: Callable[[], Any]) -> float:
    """Return the median time of a call on the GPU."""
    times = []
    for turn in range(WARM_UP + RUNS):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        call()
        end.record()
        end.synchronize()
        if turn >= WARM_UP:
            times.append(1000 * start.elapsed_time(end))
    return round(median(times), 1)


def _copy_rate() -> float:
    """Return bytes a microsecond that a copy of 1 GiB reads and writes."""
    source = torch.empty(2**28, device="cuda")
    out = torch.empty_like(source)
    return 2 * source.nbytes / _microseconds(partial(out.copy_, source))
