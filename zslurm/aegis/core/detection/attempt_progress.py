"""What is known of the ranks and nodes of an attempt, by the agents' reports: what faults are found in.

Pure: times are monotonic seconds of the supervisor that the caller gives. The age of a rank's progress is measured
on its own node by that node's monotonic clock, so a wall clock that jumps changes nothing.
"""

from __future__ import annotations

import statistics
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from zslurm.aegis.core.detection.nodes import NodeState, NodeTable
from zslurm.aegis.protocol import ProgressReport, RankProgress
from zslurm.config.aegis import AegisSection
from zslurm.train.progress import Phase

STARTUP_TIMEOUT_S = 90.0
"""Seconds that an agent gets for its first report, and in which it misses no heartbeat.

srun starts it, and a thousand nodes read Python's imports from one file system at once.
"""
LATE_S = 3.0
"""A look at a second's distance, the way of a report, a step in flight: so much later than the last report of a
dead node's agent a peer's progress may still show."""

GONE_S = 10.0
"""Seconds in which srun may still report how a rank ended whose process is gone."""

_GONE_HANG_S = GONE_S + 5.0
"""Seconds for which ranks without progress count as waiting for one whose process is gone."""

_WROTE_LATER_S = 2.0
"""How much later than the report that its process is gone a record must be written to prove that it is not."""

_STEP_TIMES = 50
# Times of steps are taken over at least this long, so that the way of a report does not matter.
_SAMPLE_S = 1.0
# Nothing came from any node for so long, or for some reports' time: their reports were held up on the way. What
# they sent meanwhile comes by and by.
_AWAY_S, _AWAY_REPORTS = 3.0, 3


@dataclass(slots=True)
class RankState:
    """What is known of a rank of the attempt.

    Attributes:
        node: its node.
        row: its progress as reported last; None before the first report.
        ended: it had a record and has none any more: it ended in order.
        gone_since: when the agent of its node first reported that its process has ended without saying so.
        gone_until: when it reported so last.
        former_pid: of the process that was this rank on the node before; its record may still be there.
        living_pid: of a process that wrote its record after its agent had called it gone. The agent looks at
            another process then (ranks may have a pid namespace), and is not believed about this one.
        left: nodes on which it was before.
    """

    node: str
    row: RankProgress | None = None
    ended: bool = False
    gone_since: float | None = None
    gone_until: float = 0.0
    former_pid: int | None = None
    living_pid: int | None = None
    left: frozenset[str] = frozenset()

    @property
    def position(self) -> tuple[int, bool]:
        """How far it is: its step, and whether its own part of the next one is done."""
        return (self.row.step, self.row.waiting) if self.row is not None else (-2, False)


def _ranks_on(rank_nodes: Sequence[str]) -> dict[str, frozenset[int]]:
    """Return the ranks of each node."""
    numbers: dict[str, list[int]] = {}
    for number, node in enumerate(rank_nodes):
        numbers.setdefault(node, []).append(number)
    return {node: frozenset(ranks) for node, ranks in numbers.items()}


class AttemptProgress:
    """Follows the ranks of one attempt after the other, and the agents that report them.

    Attributes:
        ranks: by number.
        nodes: the table of nodes.
        ranks_on: the ranks of each node of the attempt.
        attempt: number of the attempt.
        adopted: it runs since before this supervisor.
        began: when it began, or was adopted.
        front: the last step that any rank has finished in this attempt; -1 before the first.
        front_moved: when it was finished.
        over_limit: ranks that have passed the limit of their phase.
        regrouped: when ranks last regrouped in memory: what they waited for before is over.
    """

    def __init__(self, settings: AegisSection) -> None:
        """Know nothing yet; `begin` comes before anything else."""
        self.settings = settings
        self._longest_away_s = max(_AWAY_S, _AWAY_REPORTS * settings.sensors.progress_s)
        self.nodes = NodeTable(settings)
        self._read_at: float | None = None
        self._step_times: deque[float] = deque(maxlen=_STEP_TIMES)
        self.step_time_s: float | None = None
        """Median time of a step so far; None before two are finished."""

    def begin(
        self,
        attempt: int,
        rank_nodes: Sequence[str],
        now: float,
        *,
        adopted: bool = False,
        step_times: Iterable[float] = (),
    ) -> None:
        """Follow a new attempt; see `Detector.begin`."""
        self.attempt, self.began, self.adopted = attempt, now, adopted
        self._written_from = float("-inf") if adopted else now - LATE_S
        self.ranks = [RankState(node) for node in rank_nodes]
        self.ranks_on = _ranks_on(rank_nodes)
        for node in self.nodes.values():
            node.watches = False
        self.front, self._counted, self._front_at, self.front_moved = -1, -1, now, now
        self.over_limit: set[int] = set()
        self.regrouped = float("-inf")
        for seconds in step_times:
            self._take_step_time(seconds)

    # --- what comes ---------------------------------------------------------------------------------------------

    def take_silence(self, now: float) -> float:
        """Note that a report came; return the seconds before it in which none came from any node, or 0."""
        silent_s = now - (now if self._read_at is None else self._read_at)
        self._read_at = now if self._read_at is None or silent_s > 0 else self._read_at
        return silent_s if silent_s > self._longest_away_s else 0.0

    def excuse(self, seconds: float, now: float) -> None:
        """Move all times from which something is counted; see `Detector.excuse`."""
        if self._read_at is not None:
            self._read_at = min(now, self._read_at + seconds)
        self.nodes.excuse(seconds, now)
        self.began = min(now, self.began + seconds)
        self.front_moved = min(now, self.front_moved + seconds)
        self.regrouped = min(now, self.regrouped + seconds)
        for rank in self.ranks:
            rank.gone_since = None if rank.gone_since is None else rank.gone_since + seconds

    def feed(self, name: str, rows: Sequence[RankProgress], node: NodeState, now: float) -> None:
        """Take the progress of the ranks of a node, by the `known` rows of a report."""
        node.watches = True
        ranks, over_limit, regrouped_s = self.ranks, self.over_limit, now - self.regrouped
        step_limit = self.limit(Phase.STEP)
        for row in rows:
            rank, age = ranks[row.rank], row.age_s
            rank.row, rank.ended = row, False
            if rank.gone_since is not None and now - age > rank.gone_since + _WROTE_LATER_S:
                rank.living_pid = row.pid
            if row.gone and row.phase is not Phase.DONE and row.pid not in (rank.former_pid, rank.living_pid):
                rank.gone_since, rank.gone_until = now if rank.gone_since is None else rank.gone_since, now
            else:
                rank.gone_since, rank.gone_until = None, 0.0
            limit = step_limit if row.phase is Phase.STEP else self.limit(row.phase)
            if age > limit and regrouped_s > limit:
                over_limit.add(row.rank)
            elif over_limit:
                over_limit.discard(row.rank)
            if row.step > self.front:
                self._advance(row.step, now - age)
        for number in self.ranks_on.get(name, frozenset()).difference([row.rank for row in rows]):
            if ranks[number].row is not None:
                ranks[number].ended, ranks[number].gone_since = True, None
                over_limit.discard(number)

    def known(self, report: ProgressReport, now: float) -> list[RankProgress]:
        """Return the rows of a report that belong to ranks of this attempt.

        A record that was last written before the attempt began was left behind by an earlier run at the same path,
        whose ranks and agent on that node were killed. One on a node that the rank has left is of a process that
        could not remove it.
        """
        ranks, name, oldest_s = self.ranks, report.stamp.node, now - self._written_from
        return [
            row
            for row in report.ranks
            if row.rank < len(ranks) and row.age_s <= oldest_s and name not in ranks[row.rank].left
        ]

    def _advance(self, step: int, when: float) -> None:
        """Note that a rank has finished a step that none had finished before."""
        if self.front >= 0 and when - self._front_at >= _SAMPLE_S:
            self._take_step_time((when - self._front_at) / (step - self._counted))
            self._front_at, self._counted = when, step
        elif self.front < 0:
            self._front_at, self._counted = when, step
        self.front = step
        self.front_moved = max(self.front_moved, when)

    def _take_step_time(self, seconds: float) -> None:
        self._step_times.append(seconds)
        self.step_time_s = statistics.median(self._step_times)

    def move(self, rank: int, node: str) -> None:
        """Note that another process, on this node, is a rank of the attempt from now on."""
        former = self.ranks[rank]
        nodes_left = (former.left | {former.node}) - {node}
        self.ranks[rank] = RankState(
            node, former_pid=None if former.row is None else former.row.pid, left=nodes_left
        )
        self.over_limit.discard(rank)
        self.ranks_on = _ranks_on([state.node for state in self.ranks])

    def regroup(self, now: float) -> None:
        """Note that the ranks have regrouped in memory, and train on: each of their nodes has taken part."""
        self.regrouped = self.front_moved = now
        self.over_limit.clear()
        for name in self.ranks_on:
            if (node := self.nodes.get(name)) is not None and node.heard is not None:
                node.heard = max(node.heard, now)

    # --- what is asked ------------------------------------------------------------------------------------------

    def age(self, row: RankProgress, now: float) -> float:
        """Return the seconds without progress of a rank, without those before the ranks regrouped."""
        return min(row.age_s, now - self.regrouped)

    def limit(self, phase: Phase) -> float:
        """Return the seconds that a rank may go without progress in a phase.

        Until a step's time is known, a step may take as long as the setup.
        """
        hang = self.settings.hang
        if phase is Phase.STEP:
            usual = hang.setup_s if self.step_time_s is None else hang.step_factor * self.step_time_s
            return max(hang.step_s, usual)
        if phase is Phase.SETUP:
            return hang.setup_s
        limits = {Phase.SAVE: hang.save_s, Phase.EVAL: hang.eval_s, Phase.ALIVE: hang.step_s}
        return limits.get(phase, float("inf"))

    def gone(self, now: float) -> dict[int, float]:
        """Return the ranks whose processes ended long enough ago for srun to report it, with the seconds since.

        Their agents must have reported it for that time: a node that is silent since may be dead, or cut off.
        """
        return {
            number: now - rank.gone_since
            for number, rank in enumerate(self.ranks)
            if rank.gone_since is not None and rank.gone_until - rank.gone_since >= GONE_S
        }

    def waits_for_gone(self, now: float) -> bool:
        """Return whether the process of a rank went so recently that a halt of the others is no hang yet."""
        return any(rank.gone_since is not None and now - rank.gone_since < _GONE_HANG_S for rank in self.ranks)

    def unheard_s(self, name: str, now: float) -> float:
        """Return the seconds since a node's agent reported last."""
        node = self.nodes.get(name)
        if node is None or node.heard is None:
            return now - (self.began + STARTUP_TIMEOUT_S)
        return now - node.heard

    def unheard(self, now: float) -> set[str]:
        """Return the nodes of the attempt whose agents have missed their heartbeats."""
        limit = self.settings.heartbeat_timeout_s
        recent = {name for name, node in self.nodes.items() if node.heard is not None and now - node.heard < limit}
        return {name for name in self.ranks_on.keys() - recent if self.unheard_s(name, now) >= limit}

    def others_report(self, name: str, now: float) -> bool:
        """Return whether another agent has reported clearly later than one that misses heartbeats.

        Agents that all stopped together were heard last one after the other, a report's interval apart.
        """
        limit = self.settings.heartbeat_timeout_s
        later = min(limit / 2, max(LATE_S, 2 * self.settings.sensors.progress_s))
        last = now - self.unheard_s(name, now)
        return any(
            peer != name and node.heard is not None and now - node.heard < limit and node.heard > last + later
            for peer, node in self.nodes.items()
        )

    def is_lost(self, name: str) -> bool:
        """Return whether only the agent is lost, since steps were finished later: then a halt proves nothing."""
        node = self.nodes.get(name)
        return node is not None and node.lost

    def is_missing(self, rank: RankState) -> bool:
        """Return whether a rank has left no sign of it, though the agent of its node looks for one.

        None is missing once a step is finished, for which every rank is needed. An agent that was silent may
        report only after its ranks have ended.
        """
        node = self.nodes.get(rank.node)
        watched = node is not None and node.watches
        return rank.row is None and watched and not self.adopted and self.front < 0
