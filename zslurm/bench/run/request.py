"""What a user asks a benchmark for, and what it reports while it runs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

LOST_AFTER_S = 20.0
"""Seconds without a heartbeat after which a node is lost; heartbeats come every two seconds."""


@dataclass(frozen=True)
class BenchRequest:
    """What a user asked for.

    Attributes:
        benchmark: its name.
        options: of the benchmark.
        command: the command line, for the result.
        nodes: how many nodes of the cluster, of Slurm's choice; with neither this nor a list, this machine.
        nodelist: exactly these.
        ranks: on each node; default: one for each GPU, two without GPUs.
        minutes: for all points together.
        environments: variables to measure with, one after the other, each in fresh processes.
        lost_after_s: see LOST_AFTER_S.
    """

    benchmark: str
    options: dict[str, Any]
    command: Sequence[str]
    nodes: int | None = None
    nodelist: str | None = None
    ranks: int | None = None
    minutes: float | None = None
    environments: Sequence[Mapping[str, str]] = ({},)
    lost_after_s: float = LOST_AFTER_S

    @property
    def on_cluster(self) -> bool:
        """Return whether nodes were asked for."""
        return self.nodes is not None or self.nodelist is not None


class BenchProgress:
    """What happens while a benchmark runs; the command line overrides what it shows."""

    def planned(self, points: int, seconds: float) -> None:
        """Report how many points are to be measured, and the estimated time."""

    def advanced(self, done: int, points: int, left_s: float) -> None:
        """So many points are measured; the rest will take about `left_s`."""
