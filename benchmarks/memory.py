"""Peak memory of tensors: what torch's CPU allocator holds at most while an action runs, beyond what it held."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch.autograd.profiler import profile


def peak_bytes(action: Callable[[], object]) -> int:
    """Run the action; return the largest sum of bytes allocated and not yet freed while it runs."""
    torch.ones(1)  # the allocator's reports begin with its first use under the profiler
    # Not torch.profiler's, which imports torch's compiler: seconds of every process that measures.
    with profile(profile_memory=True, use_kineto=True) as profiler:
        action()
    held = peak = 0
    for event in profiler.kineto_results.events():
        if event.name() == "[memory]":
            held += event.nbytes()
            peak = max(peak, held)
    return peak
