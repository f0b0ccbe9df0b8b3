"""The peak memory of a training step, and what `zslurm plan memory` predicts, for the recipes that fit a card.

The plan counts live tensors, as torch's `max_memory_allocated` does; what the allocator holds besides is
`max_memory_reserved`. A recipe is taken with the largest microbatch up to its own whose plan leaves a tenth of the
memory free, and again with everything recomputed. On a CPU the peak is what the allocator reports to the profiler.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from typing import Any

import torch

from benchmarks.gpu.step import CONTEXT, CONTEXT_ON_CPU, TrainingStep, config_of, world_on
from benchmarks.memory import peak_bytes
from zslurm.train.config import TrainConfig
from zslurm.train.parallel.world import World
from zslurm.train.plan.memory import LEFT_FREE, plan_memory

RECIPES = ("zaya1-1b", "zaya1-400m", "zaya1-3b", "zaya1-100m", "zaya1-8b")
"""Most telling first."""
_MICRO_BATCHES = (4, 2, 1)
_STEPS = 2


def rows(device: torch.device) -> Iterator[dict[str, Any]]:
    """Yield planned and measured bytes of each recipe, or that it does not fit."""
    on_cpu = device.type == "cpu"
    room = 2**62 if on_cpu else (1 - LEFT_FREE) * torch.cuda.get_device_properties(device).total_memory
    with world_on(device.type) as world:
        for recipe in ("zaya1-tiny",) if on_cpu else RECIPES:
            for recompute in (False, True):
                about = {"recipe": recipe, "recompute": recompute, "ranks": 1}
                config = largest_that_fits(recipe, room, recompute=recompute, on_cpu=on_cpu)
                if config is None:
                    yield {**about, "problem": "does not fit on this card by the plan"}
                else:
                    yield {**about, **measured(config, world)}


def largest_that_fits(recipe: str, room: float, *, recompute: bool, on_cpu: bool) -> TrainConfig | None:
    """Return the configuration with the largest microbatch that fits."""
    context = CONTEXT_ON_CPU if on_cpu else CONTEXT
    for micro_batch in _MICRO_BATCHES:
        config = config_of(recipe, micro_batch=micro_batch, context=context, recompute=recompute)
        if plan_memory(config, 1, on_cpu=on_cpu).peak <= room:
            return config
    return None


def measured(config: TrainConfig, world: World) -> dict[str, Any]:
    """Return what two steps take at most, and what the plan has for that."""
    on_cpu = world.device.type == "cpu"
    plan = plan_memory(config, world.size, on_cpu=on_cpu)
    # Building takes further memory at the start, which is no step's.
    moments = {name: size for name, size in plan.moments.items() if name != "start"}
    planned = sum(plan.resident.values()) + max(moments.values())
    phase = config.phases[0]
    row: dict[str, Any] = {
        "micro_batch": phase.micro_batch,
        "context": phase.context,
        "planned_bytes": planned,
        "moment": max(moments, key=lambda name: moments[name]),
    }
    try:
        row |= _on_cpu(config, world) if on_cpu else _on_gpu(config, world)
    except torch.OutOfMemoryError as error:
        return row | {"problem": str(error).splitlines()[0]}
    return row | {"ratio": row["allocated_bytes"] / planned}


def _on_gpu(config: TrainConfig, world: World) -> dict[str, int]:
    gc.collect()
    torch.cuda.empty_cache()
    before = torch.cuda.memory_allocated(world.device)
    step = TrainingStep(config, world)
    torch.cuda.reset_peak_memory_stats(world.device)
    for _ in range(_STEPS):
        step.run()
    torch.cuda.synchronize(world.device)
    return {
        "allocated_bytes": torch.cuda.max_memory_allocated(world.device) - before,
        "reserved_bytes": torch.cuda.max_memory_reserved(world.device),
    }


def _on_cpu(config: TrainConfig, world: World) -> dict[str, int]:
    def run() -> None:
        step = TrainingStep(config, world)
        for _ in range(_STEPS):
            step.run()

    return {"allocated_bytes": peak_bytes(run)}
