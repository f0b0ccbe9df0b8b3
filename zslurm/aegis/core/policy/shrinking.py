"""Fewer nodes now, or all of them after a wait in the queue: which of the two costs less.

A step's time grows with the sequences of the rank that has most, ceil(B / R) of B on R data-parallel ranks
(train/data/shares.py). A job never grows: fewer nodes are used until the training is done or the job is at its
time limit, and cost (1 - 1 / ratio) of this time. A requeue costs the wait for a replacement.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable
from dataclasses import dataclass

from zslurm.aegis.types import History, WorkLeft
from zslurm.checkpoint_tools.quantities import counted, show_duration
from zslurm.config.aegis import AegisSection
from zslurm.train.data.shares import shares
from zslurm.train.errors import ConfigError

FIRST_WAIT_S = 3600.0
"""The expected wait of a run that was never requeued, if no setting gives it."""
_UNLIMITED_S = 86400.0
"""How far ahead fewer nodes are weighed if neither the job nor the training has an end that is known."""


@dataclass(frozen=True)
class Weighed:
    """Fewer nodes against a wait.

    Attributes:
        nodes: how many there are to continue with.
        step_time_ratio: a step's time on them, as a multiple of that on the nodes that a requeue would get.
        lost_s: seconds of work that the longer steps cost.
        expected_wait_s: seconds that a requeued job is expected to wait.
    """

    nodes: int
    step_time_ratio: float
    lost_s: float
    expected_wait_s: float

    @property
    def shrinks(self) -> bool:
        """Return whether fewer nodes cost no more than the wait."""
        return self.lost_s <= self.expected_wait_s

    def __str__(self) -> str:
        """Return both numbers, and what they cost, in one line."""
        return (
            f"on {counted(self.nodes, 'node')} a step takes {self.step_time_ratio:.2f} times as long, which costs "
            f"{show_duration(self.lost_s)} of work; the expected wait for a replacement is "
            f"{show_duration(self.expected_wait_s)}"
        )


@dataclass(frozen=True)
class FewerNodes:
    """Whether ranks that survived may continue on fewer nodes.

    Attributes:
        reason: why not; empty if they may.
        weighed: against a wait; None if that was not weighed.
    """

    reason: str = ""
    weighed: Weighed | None = None


def weigh(work: WorkLeft, fewer: int, all_nodes: int, in_use: int, expected_wait_s: float) -> Weighed:
    """Weigh `fewer` nodes now against `all_nodes` after a wait; `in_use` nodes have trained until now."""
    ratio = _most(work, fewer) / _most(work, all_nodes)
    times = [_UNLIMITED_S] if work.job_s is None and work.training_s is None else []
    if work.job_s is not None:
        times.append(max(0.0, work.job_s))
    if work.training_s is not None:
        times.append(work.training_s * _most(work, fewer) / _most(work, in_use))
    return Weighed(fewer, ratio, min(times) * (1 - 1 / ratio), expected_wait_s)


def why_not_fewer(
    nodes: int, settings: AegisSection, check: Callable[[], None], weighed: Callable[[], Weighed | None]
) -> FewerNodes:
    """Return why ranks that survived must not continue on a number of nodes, or that they may.

    Args:
        nodes: on which they would.
        settings: the section `aegis` of the run.
        check: raises a ConfigError if the phases cannot be trained on as many ranks.
        weighed: returns fewer nodes against a requeue; None if the job cannot be requeued.
    """
    fewest = settings.fewest_nodes
    if fewest is None or nodes < fewest:
        least = "is not set" if fewest is None else f"is {fewest}"
        return FewerNodes(f"aegis.min_nodes {least}")
    try:
        check()
    except ConfigError as error:
        return FewerNodes(str(error))
    against = weighed() if settings.heal == "auto" else None
    return FewerNodes("" if against is None or against.shrinks else str(against), against)


def expected_wait_s(history: History, settings: AegisSection) -> float:
    """Return the seconds that a requeued job is expected to wait: as set, or the median of the run's own waits."""
    if settings.expected_wait_s is not None:
        return settings.expected_wait_s
    return statistics.median(history.waits) if history.waits else FIRST_WAIT_S


def _most(work: WorkLeft, nodes: int) -> int:
    """Return the sequences of the rank that has most."""
    return max(shares(work.batch, work.micro_batch, nodes * work.ranks_per_node).sizes)
