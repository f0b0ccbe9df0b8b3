"""Who is slow: ranks that take longer than their peers for their own work.

Synchronous ranks take equally long for a step. What differs is their own work, which each rank sums up (`work_s`:
seconds of data, forward and backward per microbatch). A rank is slow if its sum grows faster than the peers'
median by a factor, in every window, for long enough. Pure: times are monotonic seconds that the caller gives.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Sequence

from zslurm.aegis.fault_kinds import STRAGGLER
from zslurm.aegis.protocol import RankProgress
from zslurm.aegis.types import Fault, Role
from zslurm.config.aegis import StragglerLimits

_LONGEST_WINDOW_S = 60.0


class StragglerDetector:
    """Compare the step work times of the ranks of an attempt, window after window."""

    def __init__(self, limits: StragglerLimits, rank_nodes: Sequence[str]) -> None:
        """Begin an attempt; `rank_nodes` is the node of each rank."""
        self._limits, self._nodes = limits, list(rank_nodes)
        self._rows: dict[int, RankProgress] = {}
        self._window_began: float | None = None
        self._window: dict[int, tuple[int, float]] = {}
        self._slow_since: dict[int, float] = {}
        self._slow: set[int] = set()

    def feed(self, rows: Iterable[RankProgress]) -> None:
        """Take the progress of some ranks."""
        for row in rows:
            row_before = self._rows.get(row.rank)
            if row_before is not None and row.work_s < row_before.work_s:
                self._window_began = None  # it counts from the beginning
            self._rows[row.rank] = row

    def check(self, now: float, wall: float) -> list[Fault]:
        """Ranks that have become slow, or are no more; `wall` (UNIX seconds) is only written into the faults."""
        if self._window_began is None:
            self._begin_window(now)
            return []
        if now - self._window_began < min(_LONGEST_WINDOW_S, self._limits.after_s / 10):
            return []
        rates = {}
        for number, (step, work) in self._window.items():
            row = self._rows[number]
            if row.step <= step:
                return []  # the window stays open until every rank has made a step
            rates[number] = (row.work_s - work) / (row.step - step)
        began = self._window_began
        self._begin_window(now)
        if len(rates) < 2 or len(rates) < len(self._nodes):
            return []
        median = statistics.median_low(rates.values())
        return self._compare(rates, median, began, now, wall) if median > 0 else []

    def _compare(
        self, rates: dict[int, float], median: float, began: float, now: float, wall: float
    ) -> list[Fault]:
        faults: list[Fault] = []
        for number, rate in rates.items():
            if rate <= self._limits.factor * median:
                self._slow_since.pop(number, None)
                if number in self._slow:
                    self._slow.discard(number)
                    faults.append(self._straggler(number, rate / median, wall, cleared=True))
            elif (
                now - self._slow_since.setdefault(number, began) >= self._limits.after_s
                and number not in self._slow
            ):
                self._slow.add(number)
                faults.append(self._straggler(number, rate / median, wall))
        return faults

    def move(self, rank: int, node: str) -> None:
        """Note that another process, on this node, is a rank from now on: nothing is known of how fast it is."""
        self._nodes[rank] = node
        self._slow.discard(rank)
        self.forget_window()

    def forget_window(self) -> None:
        """Time has passed in which the ranks may have been stopped: compare from now on."""
        self._window_began = None
        self._slow_since.clear()

    def _begin_window(self, now: float) -> None:
        self._window = {number: (row.step, row.work_s) for number, row in self._rows.items() if row.step >= 0}
        self._window_began = now

    def _straggler(self, number: int, times: float, wall: float, *, cleared: bool = False) -> Fault:
        node, step = self._nodes[number], self._rows[number].step
        line = f"rank {number} on {node} takes {times:.2f} times as long as its peers for its own work"
        line += ", no more than others again" if cleared else f", for {self._limits.after_s:.0f} s by now"
        role: Role = "root" if self._limits.act and not cleared else "advisory"
        return Fault.of_kind(
            STRAGGLER, wall, "progress", line, role=role,
            node=node, rank=number, step=step if step >= 0 else None, cleared=cleared,
        )  # fmt: skip
