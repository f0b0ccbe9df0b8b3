"""How long Python's collector stops a rank, left to itself and under metrics.gc_every.

The process has what a rank has: torch, the trainer and a model of the tiny recipe. A collection of everything is
what Python does by itself now and then, on each rank at different times; after the freeze it looks only at what
came since. Between two collections a few thousand objects are made, as in a step.
"""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Callable

import torch

import zslurm.train.main  # noqa: F401  (what a rank has imported)
from benchmarks.common import write_result
from zslurm.train.config import ModelConfig
from zslurm.train.model.zaya import build
from zslurm.train.telemetry.gc_control import GarbageControl

_TIMES = 20


def _pauses(collect: Callable[[], object]) -> list[float]:
    pauses = []
    for _ in range(_TIMES):
        made = [[number] for number in range(5000)]
        started = time.perf_counter()
        collect()
        pauses.append(time.perf_counter() - started)
        made.clear()
    return pauses


def run() -> None:
    """Measure and write results/garbage.json."""
    config = ModelConfig(vocab_size=4096, hidden_size=128, layers=4, query_heads=4, head_dim=32, experts=4)
    model = build(config, 0, dtype=torch.float32)
    objects = len(gc.get_objects())
    alone = _pauses(gc.collect)
    with GarbageControl(1) as garbage:
        controlled = _pauses(lambda: garbage.after_step(1))
    del model
    write_result(
        "garbage",
        {
            "objects": objects,
            "full_collection_ms": round(1000 * statistics.median(alone), 3),
            "after_freeze_ms": round(1000 * statistics.median(controlled), 3),
            "ratio": round(statistics.median(alone) / statistics.median(controlled), 1),
        },
    )
