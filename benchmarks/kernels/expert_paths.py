"""The experts' products in one `grouped_mm` call against the loop, on a CPU: what `parallel.grouped_gemm` chooses.

Forward and backward of one expert stage alone, turn by turn on one thread: that of the tiny recipe, and that of
the larger model of train_step. In every step each token goes to another expert, drawn with the same odds for all.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import cycle
from typing import Any

import torch

from benchmarks.common import alternate, write_result
from benchmarks.training.train_step import DTYPES, SIZES, THREADS, Size
from zslurm.kernels.dispatch import using
from zslurm.train.model.experts import Experts
from zslurm.train.model.router import Routing

WAYS = {"off": "reference", "on": "torch"}
"""Implementations of grouped_gemm, by the setting that chooses them."""
RUNS = 40
CHOICES = 64


def run() -> None:
    """Measure and write results/expert_paths.json."""
    torch.set_num_threads(THREADS)
    rows = [_compare(size, name, dtype) for size in SIZES for name, dtype in DTYPES.items()]
    write_result("expert_paths", {"torch": torch.__version__, "threads": THREADS, "experts": rows})


def _compare(size: Size, dtype_name: str, dtype: torch.dtype) -> dict[str, Any]:
    contenders = {way: _step(size, dtype, WAYS[way]) for way in WAYS}
    timings = alternate(contenders, runs=RUNS, warm_up=3)
    return {
        "model": size.name,
        "dtype": dtype_name,
        "tokens": size.tokens,
        "loop_over_grouped": round(timings["off"].median / timings["on"].median, 2),
        "loop_over_grouped_fastest": round(min(timings["off"].seconds) / min(timings["on"].seconds), 2),
        "timings": [timing.row() | {"name": f"grouped_gemm {timing.name}"} for timing in timings.values()],
    }


def _step(size: Size, dtype: torch.dtype, way: str) -> Callable[[], None]:
    """Forward and backward of an expert stage, with new choices every time."""
    config = size.config
    torch.manual_seed(0)
    experts = Experts(config, dtype)
    for parameter in experts.parameters():
        torch.nn.init.normal_(parameter, std=config.init_std)
    x_TD = torch.randn(size.tokens, config.hidden_size, dtype=dtype, requires_grad=True)
    weights_T1 = torch.full((size.tokens, 1), 0.5)
    choices = cycle(torch.randint(config.router_classes, (CHOICES, size.tokens, 1)))
    gradient_TD = torch.randn_like(x_TD)

    def step() -> None:
        experts.zero_grad()
        with using("grouped_gemm", way):
            y_TD, _ = experts(x_TD, Routing(next(choices), weights_T1, None))
            y_TD.backward(gradient_TD)

    return step
