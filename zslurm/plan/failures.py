"""How often nodes fail: published rates, each with its source, and the faults that a simulated run meets.

A fault has one of four kinds, by what has to happen next:

    node      a node is lost, or Aegis excludes it (a GPU, a NIC, the host): a spare, fewer nodes, the queue
    process   one rank ends, and its node is sound: its ranks are started again there, or recover in memory
    restart   all ranks must start again on the same nodes: the network, the storage, a library
    hang      nothing ends; the same as `process` once the limit for a step has passed

Faults come independently of each other at a constant rate for each GPU (a Poisson process), as the sources count
them. What they leave out: nodes that fail again and again, faults of many nodes at once, and young hardware.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple, Protocol, get_args

Kind = Literal["node", "process", "restart", "hang"]
KINDS: tuple[Kind, ...] = get_args(Kind)
_HOURS_OF_DAY = 24.0


@dataclass(frozen=True)
class FailureRates:
    """Faults in an hour for each GPU, by kind.

    Attributes:
        per_gpu_hour: of each kind, in the order of `KINDS`.
        source: their origin.
    """

    per_gpu_hour: tuple[float, float, float, float]
    source: str

    @property
    def total(self) -> float:
        """Return the faults of all kinds in an hour for each GPU."""
        return sum(self.per_gpu_hour)


def _observed(gpus: float, days: float, source: str, **faults: float) -> FailureRates:
    """Return the rates that a count of faults on a number of GPUs in some days means."""
    hours = gpus * days * _HOURS_OF_DAY
    node, process, restart, hang = (faults.get(kind, 0.0) / hours for kind in KINDS)
    return FailureRates((node, process, restart, hang), source)


PRESETS: dict[str, FailureRates] = {
    "llama3": _observed(
        16384,
        54,
        "419 interruptions in 54 days on 16,384 H100 (arXiv 2407.21783, table 5)",
        node=321,
        restart=91,
        hang=7,
    ),  # GPUs 268, hosts 21, unplanned maintenance 32; software 54, dependencies 2, network 35; NCCL timeouts 7
    "meta-research": _observed(
        1024,
        7.9 / _HOURS_OF_DAY,
        "a fault each 7.9 h on 1,024 A100 (arXiv 2410.21680), each taken for a lost node",
        node=1,
    ),
    "databricks": _observed(
        100, 365, "1 % of the GPUs in a year, as Databricks assumes (blog of 2026-07-01)", node=1
    ),
    "none": FailureRates((0.0, 0.0, 0.0, 0.0), "no faults"),
}
"""Published rates by name, which differ a hundredfold. No rate of MI300X clusters has been published."""


def by_mean_time(hours: float, gpus_per_node: int) -> FailureRates:
    """Return the rates if nothing happens but that nodes are lost, at a mean time between losses in hours."""
    return FailureRates((1 / (hours * gpus_per_node), 0.0, 0.0, 0.0), f"one fault of a node in {hours:g} hours")


class Faults(Protocol):
    """The faults that a run meets, in order. `now` is in seconds since the run began."""

    def next_in(self, now: float, nodes: int) -> float:
        """Return the seconds until the next fault on a number of nodes; infinity if there is none."""

    def expose(self, seconds: float, nodes: int) -> None:
        """Let a number of nodes be in use for a time without a fault."""

    def pop(self) -> SampledFault:
        """Return the next fault, which happens now."""


class SampledFault(NamedTuple):
    """A fault.

    Attributes:
        kind: of it.
        draw: by which the repair of its node is drawn, uniform in [0, 1).
        position: of its node among those in use, as a share of them, in [0, 1). The first is the batch node.
    """

    kind: Kind
    draw: float
    position: float


class RandomFaults:
    """Faults at constant rates. Equal seeds give equal faults per node-hour in use, whatever else differs.

    So two settings that are compared with one seed meet the same faults, and their difference has little noise.
    """

    def __init__(self, rates: FailureRates, gpus_per_node: int, seed: int) -> None:
        self._rate = rates.total * gpus_per_node / 3600.0
        self._shares = rates.per_gpu_hour
        self._random, self._positions = random.Random(seed), random.Random(f"positions {seed}")
        self._left = self._random.expovariate(1.0)

    def next_in(self, now: float, nodes: int) -> float:
        """Return the seconds until the next fault on a number of nodes."""
        return self._left / (self._rate * nodes) if self._rate else float("inf")

    def expose(self, seconds: float, nodes: int) -> None:
        """Let a number of nodes be in use for a time without a fault."""
        self._left = max(0.0, self._left - seconds * self._rate * nodes)

    def pop(self) -> SampledFault:
        """Return the next fault, and draw the one after it."""
        (kind,) = self._random.choices(KINDS, self._shares)
        fault = SampledFault(kind, self._random.random(), self._positions.random())
        self._left = self._random.expovariate(1.0)
        return fault


class GivenFaults:
    """Faults at given times, as they were injected into a run that was measured."""

    def __init__(self, faults: Sequence[tuple[float, Kind]], positions: Sequence[float] = ()) -> None:
        """Take (seconds since the run began, kind) pairs, in order, and their positions; by default the middle."""
        self._faults = list(faults)
        self._positions = list(positions) or [0.5] * len(faults)

    def next_in(self, now: float, nodes: int) -> float:
        """Return the seconds until the next one; one that came while nothing could fail happens at once."""
        return max(0.0, self._faults[0][0] - now) if self._faults else float("inf")

    def expose(self, seconds: float, nodes: int) -> None:
        """Do nothing: the times are fixed."""

    def pop(self) -> SampledFault:
        """Return the next fault."""
        return SampledFault(self._faults.pop(0)[1], 0.5, self._positions.pop(0))
