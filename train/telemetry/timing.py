"""Find where the time of a step goes: a clock that is always in one part of it.

    clock.enter(Part.FORWARD)      from here on it is forward
    clock.enter(Part.BACKWARD)     ... and from here on backward
    split = clock.end_step()       the step is over; the next one has begun

Every moment is in exactly one part, so that the parts sum to the step's time, and every step begins where the one
before ended; time between two steps that belongs to neither (an evaluation) is left out with `within(None)`.

On a CPU the clock is the process's. On a GPU, whose work is only queued by the host, each change is an event in
the current stream, and a part is the time between two events: work is counted where the GPU did it, and waiting
where it kept the GPU idle. So data that are read while the GPU computes cost nothing, and of a reduction that
overlaps with backward only the rest shows.

Cost: on a CPU nothing to speak of. On a GPU a few events per microbatch, and no wait: `settle` marks where the
host has waited for the device anyway, once a step, to read the loss. There a step ends for this clock, so that its
parts after that (the update, a checkpoint) are counted in the next step.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from enum import StrEnum
from itertools import pairwise

import torch


class StepPart(StrEnum):
    """A part of a step."""

    DATA = "data"  # waiting for tokens, and bringing them to the device
    FORWARD = "forward"
    BACKWARD = "backward"
    REDUCE = "reduce"  # sums over ranks that backward did not hide
    OPTIMIZER = "optimizer"  # the update, and sending the new weights to those who hold them
    GATHER = "gather"  # waiting for weights of other ranks that the next forward did not hide
    CHECKPOINT = "checkpoint"  # standing still for a checkpoint
    OTHER = "other"


_OWN_PARTS = (StepPart.DATA, StepPart.FORWARD, StepPart.BACKWARD)
"""What a rank does by itself; in the other parts it also waits for its peers."""


def work_time_ns(split: Mapping[StepPart, float], microbatches: float) -> int:
    """Return the nanoseconds of a rank's own work for each of its microbatches in a step.

    Of a part of a microbatch only the fraction counts, so that ranks with unlike shares compare.
    """
    return round(1e9 * sum(split[part] for part in _OWN_PARTS) / (microbatches or 1))


class StepClock:
    """One rank's clock."""

    def __init__(self, device: torch.device, now: Callable[[], float] = time.perf_counter) -> None:
        """Begin the first step; on CPUs, `now` gives the time in seconds."""
        self._stamps: _DeviceStamps | _HostStamps
        self._stamps = _DeviceStamps() if device.type == "cuda" else _HostStamps(now)
        self._parts: list[StepPart | None] = []
        self._settled: int | None = None  # stamps before the one that the host has waited for
        self.enter(StepPart.OTHER)

    def enter(self, part: StepPart | None) -> None:
        """From now on, and until the next call, the step is in `part`; None is time that is no step's."""
        self._parts.append(part)
        self._stamps.add()

    @contextmanager
    def within(self, part: StepPart | None) -> Iterator[None]:
        """Time the block as `part`; what follows it is in the part that was left."""
        before = self._parts[-1]
        self.enter(part)
        try:
            yield
        finally:
            self.enter(before)

    def settle(self) -> None:
        """Note that the host has waited for the device since the last part was entered.

        On a GPU the step's split then ends where that part began; on a CPU it ends with the step.
        """
        if self._stamps.queued:
            self._settled = len(self._parts) - 1

    def end_step(self) -> dict[StepPart, float]:
        """End the step: its seconds in each part. The next step begins, in Part.OTHER."""
        self.enter(StepPart.OTHER)
        count = len(self._parts) - 1 if self._settled is None else self._settled
        self._settled = None
        split = dict.fromkeys(StepPart, 0.0)
        for part, seconds in zip(self._parts[:count], self._stamps.take(count), strict=True):
            if part is not None:
                split[part] += seconds
        del self._parts[:count]
        return split


class _HostStamps:
    """Times of this process."""

    queued = False

    def __init__(self, now: Callable[[], float]) -> None:
        self._now = now
        self._times: list[float] = []

    def add(self) -> None:
        self._times.append(self._now())

    def take(self, count: int) -> list[float]:
        """Return the seconds between the first neighbours, and forget these but for the last one."""
        times = self._times[: count + 1]
        del self._times[:count]
        return [after - before for before, after in pairwise(times)]


class _DeviceStamps:
    """Events in the GPU's current stream; events of past steps are used again."""

    queued = True

    def __init__(self) -> None:
        self._events: list[torch.cuda.Event] = []
        self._free: list[torch.cuda.Event] = []

    def add(self) -> None:
        event = self._free.pop() if self._free else torch.cuda.Event(enable_timing=True)
        event.record()
        self._events.append(event)

    def take(self, count: int) -> list[float]:
        """As `_HostStamps.take`; waits for the last of the events, which is done if the host has waited."""
        events = self._events[: count + 1]
        if not events[-1].query():
            events[-1].synchronize()
        self._free += events[:-1]
        del self._events[:count]
        return [before.elapsed_time(after) / 1000 for before, after in pairwise(events)]
