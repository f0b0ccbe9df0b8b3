"""Measure how fast a step was, in tokens and in FLOPs, and how near to what the devices can do.

The peak of a device is, in this order: metrics.peak_tflops; on a CPU, which no table covers, the rate
of a matrix product that is measured once at the start, on all ranks at the same time, in the format of the run;
on a GPU the table of `train.telemetry.flops`. A GPU that is not in it, or is a part of one that is, has no MFU:
the metric is null, and one line of the log names the device and what to set.
"""

from __future__ import annotations

import logging
import time
from functools import cache

import torch
import torch.distributed as dist

from zslurm.train.config import TrainConfig
from zslurm.train.parallel.world import DTYPES, World
from zslurm.train.schedule import Position
from zslurm.train.telemetry.flops import peak_of, token_flops

_LOG = logging.getLogger(__name__)
_MEASURED_S = 0.05
_MEASURED_SIZE = 512


def device_peak(config: TrainConfig, world: World) -> float | None:
    """Return the peak of one rank's device in FLOP/s; None if unknown. All ranks call it together."""
    if config.metrics.peak_tflops is not None:
        return config.metrics.peak_tflops * 1e12
    dtype = config.parallel.dtype
    if world.device.type == "cpu":
        return _measured(DTYPES[dtype], world)
    name = torch.cuda.get_device_name(world.device)
    units = torch.cuda.get_device_properties(world.device).multi_processor_count
    peak = peak_of(name, units, dtype)
    if peak is None:
        _LOG.info(
            "note: no MFU, for the peak of %s with %d compute units in %s is not known; set metrics.peak_tflops, "
            "or add the device to PEAKS in train/telemetry/flops.py",
            name,
            units,
            dtype,
        )
    return peak


def _measured(dtype: torch.dtype, world: World) -> float:
    """Measure the FLOP/s of a square matmul on a rank's threads, the mean over ranks; draws no random numbers."""
    if world.joined:  # the other ranks train already
        return own_rate(dtype)
    ones = torch.ones(_MEASURED_SIZE, _MEASURED_SIZE, dtype=dtype)
    torch.mm(ones, ones)
    dist.barrier(group=world.group)
    rate = torch.tensor(_rate_of(ones), dtype=torch.float64)
    dist.all_reduce(rate, group=world.group)
    return rate.item() / dist.get_world_size(world.group)


@cache
def own_rate(dtype: torch.dtype) -> float:
    """Return the FLOP/s of a square matmul in this process; measured once, by a warm process while it waits."""
    ones = torch.ones(_MEASURED_SIZE, _MEASURED_SIZE, dtype=dtype)
    torch.mm(ones, ones)
    return _rate_of(ones)


def _rate_of(square: torch.Tensor) -> float:
    started, calls = time.perf_counter(), 0
    while time.perf_counter() - started < _MEASURED_S:
        torch.mm(square, square)
        calls += 1
    return calls * 2 * _MEASURED_SIZE**3 / (time.perf_counter() - started)


class ThroughputMeter:
    """Measures the throughput of the steps of one run."""

    def __init__(self, config: TrainConfig, world: World) -> None:
        """Find the peak; all ranks together."""
        self.peak = device_peak(config, world)
        self._model, self._ranks = config.model, world.size

    def of(self, here: Position, seconds: float, skip_share: float) -> dict[str, float | None]:
        """Return tokens and FLOPs a second, per rank too, and MFU, of the step `here`.

        MFU is None without a peak, and above 100 %: the peak of a CPU is measured when the run starts, and is too
        low if other programs used the CPU then.

        Args:
            here: the step.
            seconds: that the step took.
            skip_share: share of its choices that fell on the skip class.
        """
        tokens_per_s = here.step_tokens / seconds
        flops = token_flops(self._model, here.phase.context, skip_share) * tokens_per_s / self._ranks
        return {
            "tokens_per_s": tokens_per_s,
            "tokens_per_s_per_rank": tokens_per_s / self._ranks,
            "tflops_per_rank": flops / 1e12,
            "mfu": flops / self.peak if self.peak is not None and flops <= self.peak else None,
        }
