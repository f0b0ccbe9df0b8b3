"""Time an operation that all ranks of a group do together, as rccl-tests does it, until the median is stable.

rccl-tests (src/common.cu, `BenchTime`) runs an operation a few times unmeasured, then `iters` times in a row, and
divides the time of all by `iters`. Here one such row is a sample: its length is chosen so that reading the clock
and waiting for the device do not count, its time is the slowest rank's, and samples are taken until the standard
error of their median is below 1 %, or the time for the point is over. The spread of the samples is kept: what
differs less than it is noise.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import median

import torch
import torch.distributed as dist

WARM_UP = 5
LEAST_SAMPLES, MOST_SAMPLES = 5, 60
STABLE = 0.01
_SAMPLE_S = 0.02
_ONCE = 5
_TO_SIGMA = 1.4826
"""The median absolute deviation of a normal distribution times this is its standard deviation."""


@dataclass(frozen=True)
class Timing:
    """How long one operation takes.

    Attributes:
        seconds: median of the samples.
        spread: robust standard deviation of the samples, relative to the median.
        samples: how many.
    """

    seconds: float
    spread: float
    samples: int


def summarize(samples: Sequence[float]) -> Timing:
    """Return median and spread of samples in seconds."""
    middle = median(samples)
    deviation = median(abs(sample - middle) for sample in samples)
    return Timing(middle, _TO_SIGMA * deviation / middle if middle else 0.0, len(samples))


def is_stable(samples: Sequence[float]) -> bool:
    """Return whether the median is known well enough: its standard error is sigma sqrt(pi / 2 n)."""
    if len(samples) < LEAST_SAMPLES:
        return False
    return summarize(samples).spread * math.sqrt(math.pi / 2 / len(samples)) < STABLE


def time_together(
    operation: Callable[[], object],
    *,
    group: dist.ProcessGroup | None,
    device: torch.device,
    seconds: float = 2.0,
) -> Timing:
    """Time `operation` on all ranks of `group`; all of them must call it, and get the same answer.

    Args:
        operation: queues the work on the device, or does it.
        group: whose slowest rank counts; None is this rank only.
        device: waited for before the clock is read.
        seconds: about the longest time, after one sample at least; on CPUs an operation that takes five times as
            long is not repeated.
    """

    def slowest(value: float) -> float:
        if group is None:
            return value
        value_of_all = torch.tensor([value], dtype=torch.float64, device=device)
        dist.all_reduce(value_of_all, dist.ReduceOp.MAX, group=group)
        return float(value_of_all.item())

    def sample(times: int) -> float:
        slowest(0.0)  # all start together
        began = time.perf_counter()
        for _ in range(times):
            operation()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        return slowest(time.perf_counter() - began) / times

    first = sample(1)
    if device.type == "cpu" and first > _ONCE * seconds:  # a GPU's first one has much of its set-up in it
        return summarize([first])
    once = min(first, *(sample(1) for _ in range(WARM_UP - 1))) if first * WARM_UP < seconds else first
    times = max(1, min(1000, math.ceil(_SAMPLE_S / max(once, 1e-7))))
    samples: list[float] = []
    spent = first * WARM_UP
    while not samples or (len(samples) < MOST_SAMPLES and spent < seconds and not is_stable(samples)):
        samples.append(sample(times))
        spent += samples[-1] * times
    return summarize(samples)
