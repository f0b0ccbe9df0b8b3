"""What replaces a lost node without a spare: fewer nodes, a helper job or the queue, whichever costs least.

    shrink     (1 - 1 / ratio) of the time until the training is done, or the job is at its time limit
    helper     the same of the time until a helper job has started and its ranks have joined
    requeue    the wait for all nodes

A step's time grows with the sequences of the rank that has most, ceil(B / R) of B on R data-parallel ranks
(train/data/shares.py): that is the ratio. Of equal costs the first counts, so a helper job of which Slurm does not
expect a start, or only after the end, is not asked for.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from zslurm.aegis.types import History, WorkLeft
from zslurm.checkpoint_tools.quantities import counted, show_duration
from zslurm.config.aegis import AegisSection
from zslurm.train.data.shares import shares
from zslurm.train.errors import ConfigError

FIRST_WAIT_S = 3600.0
"""The expected wait of a run that was never requeued, if no setting gives it."""
HELPER_STARTS_S = 60.0
"""Seconds from the start of a helper job until its ranks have joined: its prolog, checks, imports and copies."""
_UNLIMITED_S = 86400.0
"""How far ahead fewer nodes are weighed if neither the job nor the training has an end that is known."""


@dataclass(frozen=True)
class Weighed:
    """Fewer nodes against a helper job and a requeue: what each costs, in seconds.

    Attributes:
        nodes: how many there are to continue with.
        step_time_ratio: a step's time on them, as a multiple of that on the nodes that a requeue would get.
        lost_s: what the longer steps cost until the end.
        expected_wait_s: what a requeued job is expected to wait; None if the job cannot be requeued.
        helper_wait_s: what a helper job is expected to wait; None if that is unknown, or there can be none.
        helper_lost_s: what the longer steps cost until its ranks have joined.
    """

    nodes: int
    step_time_ratio: float
    lost_s: float
    expected_wait_s: float | None
    helper_wait_s: float | None = None
    helper_lost_s: float | None = None

    @property
    def best(self) -> Literal["shrink", "helper", "requeue"]:
        """Return the measure with the least cost."""
        best: Literal["shrink", "helper"] = "helper" if self.helper_pays else "shrink"
        cost = self.lost_s if best == "shrink" or self.helper_lost_s is None else self.helper_lost_s
        return "requeue" if self.expected_wait_s is not None and self.expected_wait_s < cost else best

    @property
    def helper_pays(self) -> bool:
        """Return whether fewer nodes cost less with a helper job than without."""
        return self.helper_lost_s is not None and self.helper_lost_s < self.lost_s

    def __str__(self) -> str:
        """Return the numbers, and what they cost, in one line."""
        parts = [
            f"on {counted(self.nodes, 'node')} a step takes {self.step_time_ratio:.2f} times as long, which costs "
            f"{show_duration(self.lost_s)} of work"
        ]
        if self.helper_wait_s is not None and self.helper_lost_s is not None:
            parts.append(
                f"a helper job that is expected in {show_duration(self.helper_wait_s)} makes that "
                f"{show_duration(self.helper_lost_s)}"
            )
        if self.expected_wait_s is not None:
            parts.append(f"the expected wait for a replacement is {show_duration(self.expected_wait_s)}")
        return "; ".join(parts)


@dataclass(frozen=True)
class FewerNodes:
    """Whether ranks that survived may continue on fewer nodes.

    Attributes:
        reason: why not; empty if they may.
        weighed: against a wait; None if that was not weighed.
    """

    reason: str = ""
    weighed: Weighed | None = None


def weigh(
    work: WorkLeft,
    fewer: int,
    all_nodes: int,
    in_use: int,
    expected_wait_s: float | None,
    helper_wait_s: float | None = None,
) -> Weighed:
    """Weigh `fewer` nodes now against `all_nodes` after a wait; `in_use` nodes have trained until now."""
    ratio = _most(work, fewer) / _most(work, all_nodes)
    times = [_UNLIMITED_S] if work.job_s is None and work.training_s is None else []
    if work.job_s is not None:
        times.append(max(0.0, work.job_s))
    if work.training_s is not None:
        times.append(work.training_s * _most(work, fewer) / _most(work, in_use))
    left_s, share = min(times), 1 - 1 / ratio
    helper_s = None if helper_wait_s is None else min(left_s, helper_wait_s + HELPER_STARTS_S) * share
    return Weighed(fewer, ratio, left_s * share, expected_wait_s, helper_wait_s, helper_s)


def why_not_fewer(
    nodes: int, settings: AegisSection, check: Callable[[], None], weighed: Callable[[], Weighed | None]
) -> FewerNodes:
    """Return why ranks that survived must not continue on a number of nodes, or that they may.

    Args:
        nodes: on which they would.
        settings: the section `aegis` of the run.
        check: raises a ConfigError if the phases cannot be trained on as many ranks.
        weighed: returns fewer nodes against the other measures; None if there are none.
    """
    fewest = settings.fewest_nodes
    if not settings.may_shrink and settings.heal != "auto":
        return FewerNodes(f"aegis.heal is {settings.heal}")
    if fewest is None or nodes < fewest:
        least = "is not set" if fewest is None else f"is {fewest}"
        return FewerNodes(f"aegis.min_nodes {least}")
    try:
        check()
    except ConfigError as error:
        return FewerNodes(str(error))
    against = weighed() if settings.heal == "auto" else None
    return FewerNodes("" if against is None or against.best != "requeue" else str(against), against)


def expected_wait_s(history: History, settings: AegisSection) -> float:
    """Return the seconds that a requeued job is expected to wait: as set, or the median of the run's own waits."""
    if settings.expected_wait_s is not None:
        return settings.expected_wait_s
    return statistics.median(history.waits) if history.waits else FIRST_WAIT_S


def expected_helper_wait_s(history: History, estimate_s: float | None) -> float | None:
    """Return the seconds that a helper job is expected to wait: by Slurm, or as the run's earlier ones did."""
    if estimate_s is not None:
        return max(0.0, estimate_s)
    return statistics.median(history.helper_waits) if history.helper_waits else None


def _most(work: WorkLeft, nodes: int) -> int:
    """Return the sequences of the rank that has most."""
    return max(shares(work.batch, work.micro_batch, nodes * work.ranks_per_node).sizes)
