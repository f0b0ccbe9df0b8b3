"""Time an operation that every rank does by itself: one rank at a time, or all at the same moments."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from statistics import median
from typing import Any

from zslurm.bench.measurement import Row
from zslurm.bench.ranks import BenchRanks
from zslurm.bench.run.timing import Timing, time_together

_WARM_UP = 2


def time_alone(operation: Callable[[], object], ranks: BenchRanks, seconds: float = 1.0) -> Timing:
    """Time an operation of this rank, until the median is stable or the time is over.

    The ranks begin together, so that what they share (the memory of a CPU, the power of a node) is shared.
    """
    ranks.barrier()
    return time_together(operation, group=None, device=ranks.device, seconds=seconds)


@dataclass(frozen=True)
class Moments:
    """Times of one rank at moments that it shares with the others.

    Attributes:
        wall_s: by the clock, for each moment the mean of its calls.
        own_s: what peers are compared by: on GPUs the same; on CPUs the processor time of this rank, because ranks
            that share cores, with each other or with other programs, take longer by the clock as these please.
    """

    wall_s: list[float]
    own_s: list[float]


def time_at_once(operation: Callable[[], object], ranks: BenchRanks, *, moments: int, moment_s: float) -> Moments:
    """Time an operation on all ranks at the same moments; each is as many calls on all ranks.

    Args:
        operation: queues the work on the device, or does it.
        ranks: all call this together.
        moments: how often.
        moment_s: about how long each of them is.
    """

    def moment(calls: int) -> tuple[float, float]:
        ranks.barrier()
        processor_began, began = time.process_time(), time.perf_counter()
        for _ in range(calls):
            operation()
        ranks.synchronize()
        wall = (time.perf_counter() - began) / calls
        return wall, wall if ranks.on_gpu else (time.process_time() - processor_began) / calls

    once = min(moment(1)[0] for _ in range(_WARM_UP))
    durations = ranks.gather(once)
    calls = ranks.share(None if durations is None else max(1, math.ceil(moment_s / max(median(durations), 1e-6))))
    measured = [moment(calls) for _ in range(moments)]
    return Moments([wall for wall, _ in measured], [processor_began for _, processor_began in measured])


def name_of(ranks: BenchRanks, rank: int) -> str:
    """Return how a rank is called in results: its node, and its GPU there."""
    local = rank % ranks.local_size
    return f"{ranks.nodes[rank // ranks.local_size]} {'GPU' if ranks.on_gpu else 'rank'} {local}"


def rates_of_all(rate: float, timing: Timing, ranks: BenchRanks, unit: str, **more: Any) -> Row | None:
    """Return the row of what each rank measured by itself, on rank 0: the median rank's figures and the slowest.

    Args:
        rate: of this rank, higher is better.
        timing: of this rank.
        ranks: all call this together.
        unit: column of the rate, such as "gb_s".
        more: numbers of this rank that are summed over all.
    """
    gathered = ranks.gather([rate, timing.seconds, timing.spread, timing.samples, more])
    if gathered is None:
        return None
    rates = [answer[0] for answer in gathered]
    slowest = min(range(len(rates)), key=rates.__getitem__)
    return {
        "seconds": median(answer[1] for answer in gathered),
        "spread": median(answer[2] for answer in gathered),
        "samples": min(answer[3] for answer in gathered),
        unit: median(rates),
        f"total_{unit}": sum(rates),
        f"least_{unit}": rates[slowest],
        "slowest": name_of(ranks, slowest) if len(rates) > 1 else "",
        f"ranks_{unit}": rates,
        **{name: sum(answer[4][name] for answer in gathered) for name in more},
    }
