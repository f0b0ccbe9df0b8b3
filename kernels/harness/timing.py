"""Time functions on a device, in turn, and measure what its memory gives.

A time is that of several calls, one after the other, until the device has done them, divided by their number: the
longer of what the host takes to launch them and of what the device takes to run them, as in training.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping
from functools import cache

import torch

_LEAST_S = {"cuda": 0.004, "cpu": 0.002}
"""Length of one sample: of fewer calls the clock and the wait would be part of the figure."""
_WARM_UP, _SAMPLES = 3, 9
_MOST_CALLS = 2000

Run = Callable[[], object]


def medians(contenders: Mapping[str, Run], device: torch.device, *, samples: int = _SAMPLES) -> dict[str, float]:
    """Return the median seconds of a call of each; they take turns, so that a slow moment hits all of them."""
    calls = {name: _calls(run, device) for name, run in contenders.items()}
    seconds: dict[str, list[float]] = {name: [] for name in contenders}
    for _ in range(samples):
        for name, run in contenders.items():
            seconds[name].append(_sample(run, calls[name], device))
    return {name: statistics.median(seconds_of_name) for name, seconds_of_name in seconds.items()}


def _calls(run: Run, device: torch.device) -> int:
    """Warm up, and return how many calls make a sample long enough."""
    for _ in range(_WARM_UP):
        _sample(run, 1, device)
    once = max(_sample(run, 1, device), 1e-7)
    return max(1, min(_MOST_CALLS, round(_LEAST_S[device.type] / once)))


def _sample(run: Run, calls: int, device: torch.device) -> float:
    wait(device)
    started = time.perf_counter()
    for _ in range(calls):
        run()
    wait(device)
    return (time.perf_counter() - started) / calls


def wait(device: torch.device) -> None:
    """Wait until a GPU has done what was launched."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


@cache
def triad(device: torch.device) -> float:
    """Return the bytes a second of a = b + s c in fp32, three arrays that no cache holds."""
    elements = 2**27 if device.type == "cuda" else 2**23
    a, b, c = (torch.ones(elements, device=device) for _ in range(3))
    seconds = medians({"triad": lambda: torch.add(b, c, alpha=2.0, out=a)}, device)["triad"]
    return 3 * 4 * elements / seconds
