"""A training step of zaya1-1b in bf16 against `ZayaForCausalLM` of transformers, eager and compiled.

Forward and backward of one microbatch of 4,096 tokens, weights and tokens the same in both.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch

from benchmarks.training.models import TINY, recipe
from benchmarks.training.train_step import Pair, Size
from zslurm.kernels.harness.timing import medians

_SAMPLES = 5


def rows(device: torch.device) -> Iterator[dict[str, Any]]:
    """Yield tokens a second and peak memory of each, as soon as it is measured."""
    small = device.type == "cpu"
    size = Size("tiny", TINY, 2, 64, 0) if small else Size("zaya1-1b", recipe("zaya1-1b"), 1, 4096, 0)
    dtype, name = torch.bfloat16, "cpu" if small else "cuda"
    eager = Pair(size, dtype, name)
    losses = eager.step().item(), eager.reference_step().item()
    yield {"model": size.name, "loss": losses[0], "loss_of_transformers": losses[1]}
    yield from _timed(size, {"ours": eager.step, "transformers": eager.reference_step}, device)
    if small:  # compiling takes minutes there
        return
    del eager
    torch.cuda.empty_cache()
    compiled = Pair(size, dtype, name)
    compiled.ours.run_with(compile=True)
    yield from _timed(size, {"ours compiled": compiled.step}, device)
    compiled.reference.compile()
    yield from _timed(size, {"transformers compiled": compiled.reference_step}, device)


def _timed(size: Size, contenders: dict[str, Callable[[], Any]], device: torch.device) -> Iterator[dict[str, Any]]:
    seconds = medians(contenders, device, samples=_SAMPLES)
    for name, step in contenders.items():
        row = {
            "model": size.name,
            "name": name,
            "seconds": seconds[name],
            "tokens_per_s": size.tokens / seconds[name],
        }
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(device)
            step()
            torch.cuda.synchronize(device)
            row["peak_bytes"] = torch.cuda.max_memory_allocated(device)
        yield row
