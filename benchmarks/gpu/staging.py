"""What a save costs a training step: the copy of a rank's share of the state into host memory, during training.

The copy is `train/checkpointing/snapshot.py`'s: page-locked memory, on a second stream, from the end of a step
until the update of the next one. Measured are its rate by itself, and the step's time with and without one under
it. The part of the copy by which the step does not get longer is hidden. The state is all of it, as on one card.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterator
from typing import Any

import torch

from benchmarks.gpu.step import CONTEXT, CONTEXT_ON_CPU, TrainingStep, config_of, world_on
from zslurm.kernels.harness.timing import wait
from zslurm.train.checkpointing.snapshot import HostSnapshot, available_memory, snapshot_bytes

_SAMPLES = 5


def rows(device: torch.device) -> Iterator[dict[str, Any]]:
    """Yield bytes, rate and the step's times, as soon as each is known."""
    small = device.type == "cpu"
    recipe, micro_batch = ("zaya1-tiny", 2) if small else ("zaya1-1b", 4)
    config = config_of(recipe, micro_batch=micro_batch, context=CONTEXT_ON_CPU if small else CONTEXT)
    with world_on(device.type) as world:
        step = TrainingStep(config, world)
        tensors = {state.name: state.values for state in step.optimizer.states}
        size, free = snapshot_bytes(tensors), available_memory()
        about = {"model": recipe, "tokens": step.tokens, "bytes": size}
        # torch rounds page-locked allocations up to a power of two.
        if 2 * size > free:
            yield {**about, "problem": f"needs {2 * size} bytes of host memory, {free} are free"}
            return
        started = time.perf_counter()
        snapshot = HostSnapshot(tensors)
        yield {**about, "allocated_in_s": time.perf_counter() - started}
        copy = statistics.median(_copy_s(snapshot, device) for _ in range(_SAMPLES))
        yield {**about, "copy_s": copy, "bytes_per_s": size / copy}
        step.run()
        steps: dict[bool, list[float]] = {False: [], True: []}
        for _ in range(_SAMPLES):
            for saves in steps:
                steps[saves].append(_step_s(step, snapshot if saves else None))
    without, beside = (statistics.median(steps[saves]) for saves in (False, True))
    yield {
        **about,
        "step_s": without,
        "step_with_a_save_s": beside,
        "hidden_share": max(0.0, min(1.0, 1 - (beside - without) / copy)),
    }


def _copy_s(snapshot: HostSnapshot, device: torch.device) -> float:
    """Return the seconds of a copy while nothing else runs."""
    wait(device)
    started = time.perf_counter()
    snapshot.begin()
    snapshot.copied()
    return time.perf_counter() - started


def _step_s(step: TrainingStep, snapshot: HostSnapshot | None) -> float:
    """Return the seconds of a step, with a copy under its forward and backward if there is a snapshot."""
    device = step.world.device
    wait(device)
    started = time.perf_counter()
    if snapshot is not None:
        snapshot.begin()
    step.run(before_update=snapshot.wait if snapshot is not None else lambda: None)
    wait(device)
    seconds = time.perf_counter() - started
    if snapshot is not None:
        snapshot.copied()
    return seconds
