"""From what agents report to faults: ranks that hang, nodes that are dead, ranks that are slow, what sensors saw.

Pure: fed with reports and the time, it yields faults; it reads no clock and no file. Times are monotonic seconds
of the supervisor, and the age of a rank's progress is measured on its own node by that node's monotonic clock, so
a wall clock that jumps changes nothing; it is only written into the faults.

**A hang.** A rank that is over the limit of its phase says that something hangs, not who: the others wait for it
in a collective. Named are those whose process is stopped; else those that lag: the lowest step, and there those
that have not done their own part of it (`RankProgress.waiting`); among several at work, those whose progress is
clearly the oldest. While they are within the limit of their own phase, as a rank that writes a checkpoint,
everybody else may wait. Where all stand at the same point, none is singled out: one fault without a rank. Until a
step's time is known, a step may take as long as the setup.

**A dead node.** A node's agent that is silent proves nothing: a stalled file system silences the agent of a
healthy node, and its training goes on. Its ranks' progress is known only through that agent, so it is looked for
elsewhere: synchronous training cannot go on without any rank. So a silent node is dead where, besides, Slurm says
so, or Slurm cannot start anything there, or ranks elsewhere complain of lost peers that nobody has named, or the
other ranks, whose agents speak, have finished no step for longer than two usual steps take, or one of them has
passed its limit. While steps are finished, only the agent is lost. If all agents are silent, the fault is on this
side: nobody is dead.

In phases without steps (setup, a save, an evaluation) standing still is usual, and a stalled file system likely:
there it takes Slurm's or the peers' word, or the limit of the phase.

Who is slow: see stragglers.py, and what the sensors saw goes through sensor_faults.py.
"""

from __future__ import annotations

import statistics
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from zslurm.aegis.detection.sensor_faults import SensorFaults
from zslurm.aegis.detection.stragglers import StragglerDetector
from zslurm.aegis.fault_kinds import AGENT_LOST, NODE_DEAD, RANK_HANG
from zslurm.aegis.protocol import ProgressReport, RankProgress, Report, SensorReport
from zslurm.aegis.types import Fault
from zslurm.checkpoint_tools.quantities import counted
from zslurm.config.aegis import AegisSection
from zslurm.train.progress import Phase

# An agent that has not said its first word is not silent yet: srun and Python have to start.
_FIRST_WORD_S = 90.0
# A look at a second's distance, the way of a report, a step in flight: so much later than the last word of a dead
# node's agent a peer's progress may still show.
_LATE_S = 3.0
# Ages nearer to each other than this say nothing about who lags.
_DISTINCT_S, _TOGETHER_S = 2.0, 1.0
_STEP_TIMES = 50
# Times of steps are taken over at least this long, so that the way of a report does not matter.
_SAMPLE_S = 1.0
# Nothing was read of any node for so long, or for some reports' time: we ourselves were stopped. What came
# meanwhile is read by and by.
_AWAY_S, _AWAY_REPORTS = 3.0, 3
# More ranks than this are not named one by one.
_MOST_NAMED = 64


@dataclass(slots=True)
class _Rank:
    """What is known of a rank of the attempt."""

    node: str
    row: RankProgress | None = None
    ended: bool = False
    """It had a record and has none any more: it ended in order."""

    @property
    def place(self) -> tuple[int, bool]:
        """How far it is: its step, and whether its own part of the next one is done."""
        return (self.row.step, self.row.waiting) if self.row is not None else (-2, False)


@dataclass(slots=True)
class _Node:
    """What is known of a node."""

    heard: float | None = None
    lost: bool = False
    """Its agent was reported as lost."""
    seq: int = -1
    seen: set[int] | None = None
    """Ranks in the look that is being reported."""
    watches: bool = False
    """Its agent has reported about this attempt."""


class Detector:
    """Turns reports into faults. One for the life of a supervisor; `begin` for each attempt."""

    def __init__(self, settings: AegisSection) -> None:
        """Nothing is known yet.

        Args:
            settings: of the run.
        """
        self._settings = settings
        self._nodes: dict[str, _Node] = {}
        self._ranks: list[_Rank] = []
        self._ranks_on: dict[str, frozenset[int]] = {}
        self._attempt = 0
        self._adopted = False
        self._began = 0.0
        self._read_at: float | None = None
        self._step_times: deque[float] = deque(maxlen=_STEP_TIMES)
        self._median: float | None = None
        self._sensors = SensorFaults()
        self._stragglers = StragglerDetector(settings.straggler)
        self._forget_attempt(0.0)

    def _forget_attempt(self, now: float) -> None:
        self._front, self._counted, self._front_at, self._front_moved = -1, -1, now, now
        self._over: set[int] = set()
        self._named: set[int | None] = set()
        self._dead: set[str] = set()
        self._declared: set[str] = set()

    def begin(self, attempt: int, rank_nodes: Sequence[str], now: float, *, adopted: bool = False) -> None:
        """A new attempt starts.

        Args:
            attempt: its number; progress of other attempts is ignored.
            rank_nodes: the node of each rank.
            now: monotonic seconds.
            adopted: it runs since before this supervisor, so silence and missing records say nothing at first.
        """
        self._attempt, self._began, self._adopted = attempt, now, adopted
        self._ranks = [_Rank(node) for node in rank_nodes]
        self._ranks_on = {
            name: frozenset(number for number, node in enumerate(rank_nodes) if node == name)
            for name in dict.fromkeys(rank_nodes)
        }
        for node in self._nodes.values():
            node.seen, node.watches = None, False
        self._sensors.begin_attempt()
        self._stragglers.begin_attempt(rank_nodes)
        self._forget_attempt(now)

    def take_up(self, faults: Iterable[Fault]) -> None:
        """Know the faults that another supervisor has recorded of this attempt; call it after `begin`."""
        self._sensors.take_up(faults)

    # --- what is known --------------------------------------------------------------------------------------

    @property
    def step(self) -> int:
        """The last step that any rank has finished in this attempt; -1 before the first."""
        return self._front

    # --- what comes -----------------------------------------------------------------------------------------

    def feed(self, report: Report, now: float, wall: float | None = None) -> None:
        """Take a report; its faults come with the next `check`.

        Args:
            report: of an agent.
            now: when it came, monotonic seconds.
            wall: the same in UNIX seconds; None: the clock of its node is right.
        """
        self._excuse(now)
        name = report.stamp.node
        node = self._nodes.setdefault(name, _Node())
        node.heard = now if node.heard is None else max(node.heard, now)
        node.lost = False
        self._dead.discard(name)
        if isinstance(report, ProgressReport):
            if report.ok and report.attempt == self._attempt:
                self._feed_progress(report, node, now)
        elif isinstance(report, SensorReport):
            self._sensors.feed(report, now, wall)

    def _excuse(self, now: float) -> None:
        """A report is read: time in which none was read of any node is nobody's silence."""
        away = now - (now if self._read_at is None else self._read_at)
        if away > max(_AWAY_S, _AWAY_REPORTS * self._settings.sensors.progress_s):
            for node in self._nodes.values():
                node.heard = None if node.heard is None else min(now, node.heard + away)
            # Perhaps the whole job was suspended: nobody could start, finish a step, or be slow meanwhile.
            self._began, self._front_moved = self._began + away, self._front_moved + away
            self._stragglers.forget_window()
        self._read_at = now if self._read_at is None else max(now, self._read_at)

    def _feed_progress(self, report: ProgressReport, node: _Node, now: float) -> None:
        node.watches = True
        if node.seen is None or report.stamp.seq != node.seq:
            node.seen, node.seq = set(), report.stamp.seq
        for row in report.ranks:
            if row.rank >= len(self._ranks):
                continue
            rank = self._ranks[row.rank]
            self._stragglers.feed(row)
            rank.row, rank.ended = row, False
            node.seen.add(row.rank)
            if row.age_s > self._limit(row.phase):
                self._over.add(row.rank)
            else:
                self._over.discard(row.rank)
            if row.step > self._front:
                self._advance(row.step, now - row.age_s)
        if not report.more:
            for number in self._ranks_on.get(report.stamp.node, frozenset()) - node.seen:
                if self._ranks[number].row is not None:
                    self._ranks[number].ended = True
                    self._over.discard(number)
            node.seen = None

    def _advance(self, step: int, when: float) -> None:
        """A rank has finished a step that none had finished before."""
        if self._front >= 0 and when - self._front_at >= _SAMPLE_S:
            self._step_times.append((when - self._front_at) / (step - self._counted))
            self._median = statistics.median(self._step_times)
            self._front_at, self._counted = when, step
        elif self._front < 0:
            self._front_at, self._counted = when, step
        self._front = step
        self._front_moved = max(self._front_moved, when)

    def _limit(self, phase: Phase) -> float:
        """Seconds that a rank may go without progress."""
        hang = self._settings.hang
        if phase is Phase.STEP:
            usual = hang.setup_s if self._median is None else hang.step_factor * self._median
            return max(hang.step_s, usual)
        return {Phase.SETUP: hang.setup_s, Phase.SAVE: hang.save_s, Phase.EVAL: hang.eval_s}.get(
            phase, float("inf")
        )

    # --- what is found --------------------------------------------------------------------------------------

    def check(
        self,
        now: float,
        wall: float,
        *,
        dead: Mapping[str, str] | None = None,
        trouble: Mapping[str, str] | None = None,
        lost_peers: bool = False,
    ) -> list[Fault]:
        """What was found since the last call. Feed all reports first.

        Args:
            now: monotonic seconds.
            wall: UNIX seconds; only written into the faults.
            dead: nodes that Slurm has declared failed (srun's "Node failure on"), with the reason.
            trouble: nodes that Slurm calls down or not responding, or on which it can start nothing, with its
                words: enough for a node whose agent is silent.
            lost_peers: ranks complain of peers that have left, and nobody has said which.
        """
        found = self._sensors.take()
        if self._ranks:
            found += self._check_nodes(now, wall, dead or {}, trouble or {}, lost_peers=lost_peers)
            if self._over or self._someone_missing(now):
                found += self._check_hang(now, wall)
            found += self._stragglers.check(now, wall)
        return found

    def _silence(self, name: str, now: float) -> float:
        """Seconds since a node's agent said something."""
        node = self._nodes.get(name)
        if node is None or node.heard is None:
            return now - (self._began + _FIRST_WORD_S)
        return now - node.heard

    def _check_nodes(
        self, now: float, wall: float, dead: Mapping[str, str], trouble: Mapping[str, str], *, lost_peers: bool
    ) -> list[Fault]:
        limit = self._settings.silent_s
        silent = {name for name in self._ranks_on if self._silence(name, now) >= limit}
        found = []
        declared = dead.keys() & self._ranks_on.keys()
        for name in sorted((silent - self._dead) | (declared - self._declared)):
            why = dead.get(name)
            self._declared |= {name} & declared
            if why is None and name in trouble:
                why = f"its agent is silent; {trouble[name]}"
            elif why is None and self._others_speak(name, now) and not self._is_lost(name):
                why = self._why_dead(name, now, lost_peers=lost_peers)
            if why is not None:
                found.append(self._node_dead(name, why, now, wall))
            elif self._goes_on_without(name):
                found += self._agent_lost(name, now, wall)
        return found

    def _others_speak(self, name: str, now: float) -> bool:
        """Whether another agent has spoken clearly later than a silent one.

        Agents that all fell silent together did so one after the other, a report's interval apart.
        """
        limit = self._settings.silent_s
        later = min(limit / 2, max(_LATE_S, 2 * self._settings.sensors.progress_s))
        last = now - self._silence(name, now)
        return any(
            other != name and node.heard is not None and now - node.heard < limit and node.heard > last + later
            for other, node in self._nodes.items()
        )

    def _why_dead(self, name: str, now: float, *, lost_peers: bool) -> str | None:
        """Why a node whose agent is silent is dead, by what is seen elsewhere; None where it may be alive."""
        if lost_peers:
            return "its agent is silent, and ranks elsewhere have lost their peers"
        others = [
            rank.row
            for rank in self._ranks
            if rank.node != name and rank.row is not None and not rank.ended
            and self._silence(rank.node, now) < self._settings.silent_s
        ]  # fmt: skip
        if not others or self._median is None or any(row.phase is not Phase.STEP for row in others):
            return None
        still = now - self._front_moved
        if still < max(self._settings.silent_s, 2 * self._median):
            return None
        return f"its agent is silent, and no rank has finished a step for {still:.0f} s"

    def _node_dead(self, name: str, why: str, now: float, wall: float) -> Fault:
        self._dead.add(name)
        node = self._nodes.get(name)
        since = wall - (now - node.heard) if node is not None and node.heard is not None else wall
        line = f"node {name} is dead: {why}"
        return Fault.of_kind(NODE_DEAD, since, "agent", line, node=name, step=self._step_on(name))

    def _step_on(self, name: str) -> int | None:
        steps = [rank.row.step for rank in self._ranks if rank.node == name and rank.row is not None]
        return max(steps) if steps and max(steps) >= 0 else None

    def _is_lost(self, name: str) -> bool:
        """Whether only the agent is lost, since steps were finished later: then a halt proves nothing."""
        node = self._nodes.get(name)
        return node is not None and node.lost

    def _goes_on_without(self, name: str) -> bool:
        """Whether steps are finished though this node's agent says nothing."""
        node = self._nodes.get(name)
        if node is None or node.heard is None:
            return self._front_moved > self._began + _LATE_S
        return self._front_moved > node.heard + _LATE_S + (self._median or 0.0)

    def _agent_lost(self, name: str, now: float, wall: float) -> Iterable[Fault]:
        node = self._nodes.setdefault(name, _Node())
        if node.lost:
            return
        node.lost = True
        line = f"no word of the agent on {name} for {self._silence(name, now):.0f} s; its ranks go on"
        yield Fault.of_kind(AGENT_LOST, wall, "agent", line, node=name)

    # --- hangs ----------------------------------------------------------------------------------------------

    def _someone_missing(self, now: float) -> bool:
        """Whether a rank should have begun by now and has left no sign of it."""
        if self._adopted or now - self._began <= self._settings.hang.setup_s:
            return False
        return any(self._is_missing(rank) for rank in self._ranks)

    def _is_missing(self, rank: _Rank) -> bool:
        node = self._nodes.get(rank.node)
        return rank.row is None and node is not None and node.watches and not self._adopted

    def _check_hang(self, now: float, wall: float) -> list[Fault]:
        limit = self._settings.silent_s
        silent = {name for name in self._ranks_on if self._silence(name, now) >= limit}
        suspects = {name for name in silent - self._dead if not self._is_lost(name)}
        if any(self._ranks[number].node not in silent for number in self._over) and suspects:
            why = "its agent is silent, and a rank elsewhere has passed its limit without progress"
            dead = [name for name in sorted(suspects) if self._others_speak(name, now)]
            return [self._node_dead(name, why, now, wall) for name in dead]
        if suspects or self._dead:
            return []  # who waits for a dead node does not hang
        alive = [
            number
            for number, rank in enumerate(self._ranks)
            if not rank.ended and rank.node not in silent and (rank.row is not None or self._is_missing(rank))
        ]
        lag = self._lagging(alive, now)
        late = [number for number in lag if self._is_late(number, now)]
        if not late:
            return []
        if (len(lag) == len(alive) and len(alive) > 1) or len(late) > _MOST_NAMED:
            if None in self._named:
                return []
            self._named.add(None)
            age = min(self._age(number, now) for number in late)
            where = self._where(late[0])
            which = f"{len(late)} of {counted(len(alive), 'rank')}"
            line = f"{which} stand still {where} for {age:.0f} s, and none is behind"
            return [Fault.of_kind(RANK_HANG, wall, "progress", line, step=self._step_of(late[0]))]
        found = []
        for number in late:
            if number in self._named:
                continue
            self._named.add(number)
            rank = self._ranks[number]
            line = (
                f"rank {number} on {rank.node} made no progress for {self._age(number, now):.0f} s "
                f"{self._where(number)} (limit {self._limit_of(number):.0f} s); "
                f"{len(alive) - len(lag)} of {counted(len(alive), 'rank')} are further"
            )
            found.append(
                Fault.of_kind(
                    RANK_HANG, wall, "progress", line,
                    node=rank.node, rank=number, step=self._step_of(number),
                )
            )  # fmt: skip
        return found

    def _lagging(self, alive: Sequence[int], now: float) -> list[int]:
        """Those of the ranks that everybody else waits for."""
        if not alive:
            return []
        halted = [number for number in alive if (row := self._ranks[number].row) is not None and row.halted]
        if halted:
            return sorted(halted, key=lambda number: -self._age(number, now))
        lowest = min(self._ranks[number].place for number in alive)
        lag = [number for number in alive if self._ranks[number].place == lowest]
        ages = {number: self._age(number, now) for number in lag}
        oldest = max(ages.values())
        _, waiting = lowest
        if not waiting and oldest - min(ages.values()) >= _DISTINCT_S:
            lag = [number for number in lag if ages[number] >= oldest - _TOGETHER_S]
        return sorted(lag, key=lambda number: -ages[number])

    def _age(self, number: int, now: float) -> float:
        row = self._ranks[number].row
        return now - self._began if row is None else row.age_s

    def _limit_of(self, number: int) -> float:
        row = self._ranks[number].row
        return self._limit(Phase.SETUP if row is None else row.phase)

    def _is_late(self, number: int, now: float) -> bool:
        return self._age(number, now) > self._limit_of(number)

    def _step_of(self, number: int) -> int | None:
        row = self._ranks[number].row
        return row.step if row is not None and row.step >= 0 else None

    def _where(self, number: int) -> str:
        row = self._ranks[number].row
        if row is None:
            return "before it could say that it had started"
        if row.phase is Phase.STEP:
            how = ", its process stopped" if row.halted else ", waiting for others" if row.waiting else ""
            return f"in step {row.step + 1}{how}"
        return {
            Phase.SETUP: "in its setup",
            Phase.SAVE: f"saving after step {row.step}",
            Phase.EVAL: f"in the evaluation after step {row.step}",
        }.get(row.phase, "at its end")
