"""What is known of a run in the simulated world: the rows of its events, and its job in Slurm's queue."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from zslurm.aegis.core.policy.history import history_of
from zslurm.aegis.simulation.world import World
from zslurm.aegis.types import History
from zslurm.config.aegis import AegisSection
from zslurm.run.exclusions import active_exclusions

REQUEUE_S, PREEMPTED_S = 5, 20
"""Seconds for which a requeued job waits at least, and for which a preempted one does."""


HELPER_S, LAPSED_S = 12, 30
"""Seconds for which a helper job waits at least, and after which one ends that no supervisor has any more."""


@dataclass
class HelperTruth:
    """A helper job.

    Attributes:
        name: its number in the queue.
        count: nodes that it asks for.
        start: the start of the run's job that it helps.
        due: when it may start.
        nodes: that it has; none before it starts.
        over: it has ended.
        lost_at: since when no supervisor has it; None while one does.
    """

    name: str
    count: int
    start: int
    due: int
    nodes: tuple[str, ...] = ()
    over: bool = False
    lost_at: int | None = None


class Killed(Exception):
    """The supervisor is killed."""


@dataclass
class RunRecord:
    """What is known of one run, from its submission to its end, and what may be asked of Slurm.

    Attributes:
        world: in which it is.
        settings: the section `aegis`.
        needed: nodes that the ranks need.
        spares: nodes that the job asks for besides.
        rows: what was recorded, as in events.jsonl.
        allocated: the nodes of the job.
        excluded: nodes that the job must not get, by Slurm's list.
        outcome: how the run ended; empty while it has not.
        why: why it ended, or waits.
        until: when the job may start, or the batch script starts the next supervisor.
        requeue_s: seconds for which a requeued job waits at least.
        helper_s: seconds for which a helper job waits at least.
        helper_wait_s: what Slurm expects a helper job to wait; None if it does not know, and nothing is weighed.
    """

    world: World
    settings: AegisSection
    needed: int
    spares: int
    rows: list[dict[str, Any]] = field(default_factory=list)
    allocated: list[str] = field(default_factory=list)
    excluded: set[str] = field(default_factory=set)
    outcome: str = ""
    why: str = "it was submitted"
    until: int = 0
    requeue_s: int = REQUEUE_S
    helper_s: int = HELPER_S
    helper_wait_s: float | None = None

    def __post_init__(self) -> None:
        self._brief: list[dict[str, Any]] = []
        """The rows, without lists of all nodes: to read those again and again takes long on large clusters."""
        self._history = History()
        self.supervisor: object | None = None
        """The one that has the run; None while the job is in the queue."""
        self.former: object | None = None
        """One whose host Slurm cannot reach, while the job was requeued."""
        self.unreached = ""
        """The node of that one."""
        self.foreign: list[str] = []
        """What a supervisor has done that no longer had the run."""
        self.alive = True
        """Whether the process of the supervisor runs."""
        self.asked = self.needed + self.spares
        """Nodes that the job asks for."""
        self.left: set[int] = set()
        """Attempts of earlier starts of the job."""
        self.starts = 0
        """How often the job has started."""
        self.is_requeued_by_slurm = False
        """Slurm itself has put the job back last."""
        self.dead: set[str] = set()
        """Nodes that have died since the job started."""
        self.helpers: list[HelperTruth] = []
        """All helper jobs so far."""
        self.recorded_at = 0
        """When the last event was written."""
        self.moments = 0
        """Moments in which the supervisor could be killed so far: one before and one after each action."""

    def record(self, kind: str, time: float, /, **fields: Any) -> None:
        """Write an event."""
        self.recorded_at = self.world.now
        self.rows.append({"time": time, "event": kind, "job_id": "1", **fields})

    @property
    def history(self) -> History:
        """What the run went through."""
        if len(self._brief) == len(self.rows):
            return self._history
        for row in self.rows[len(self._brief) :]:
            long = () if row["event"] == "nodes_excluded" else ("nodes", "resources")
            self._brief.append({name: value for name, value in row.items() if name not in long})
        self._history = history_of(self._brief)
        return self._history

    @property
    def excluded_nodes(self) -> set[str]:
        """The nodes that the run does not use now."""
        return set(active_exclusions(self.history.exclusions, self.world.wall))

    def may_be_killed(self) -> None:
        """Count a moment before or after an action, in which the supervisor may be killed."""
        self.moments += 1
        if self.world.kill_supervisor is None:
            return
        moments_left, latest = self.world.kill_supervisor
        self.world.kill_supervisor = (moments_left - 1, latest) if moments_left > 0 else None
        if moments_left <= 0:
            raise Killed

    def put_back(self, wait_s: int, why: str) -> None:
        """Put the job back into the queue, and end everything on its nodes."""
        attempt = self.world.attempt
        if attempt is not None and attempt.over is None:
            self.world.kill(self.unreached)
        self.supervisor, self.until, self.why = None, self.world.now + wait_s, why
        self.world.preempted_until = None

    def requeue(self, excluded: set[str] | None, n_nodes: int | None, why: str) -> None:
        """Put the job back into the queue, as its supervisor asks for; None leaves what the job has."""
        self.excluded = self.excluded if excluded is None else excluded
        self.asked = self.asked if n_nodes is None else n_nodes
        self.put_back(self.requeue_s, why)

    def submit_helper(self, count: int) -> None:
        """Submit a helper job."""
        due = self.world.now + self.helper_s
        self.helpers.append(HelperTruth(f"h{len(self.helpers)}", count, self.starts, due))

    def end_helper(self, helper: HelperTruth) -> None:
        """End a helper job, and every process on its nodes."""
        helper.over = True
        self.world.agents_on -= set(helper.nodes)
        self.world.kill_on(helper.nodes)

    def end_helpers(self) -> None:
        """End every helper job."""
        for helper in self.helpers:
            if not helper.over:
                self.end_helper(helper)

    def tend_helpers(self) -> None:
        """Start helper jobs that are due, and end those that are over.

        Somebody cancels them, no supervisor has them any more, or Slurm has noticed that all their nodes died.
        """
        world = self.world
        if world.ends_helpers:
            world.ends_helpers = False
            self.end_helpers()
        has_supervisor = self.supervisor is not None and self.alive
        for helper in [helper for helper in self.helpers if not helper.over]:
            helper.lost_at = None if has_supervisor else helper.lost_at or world.now
            has_lapsed = helper.lost_at is not None and world.now >= helper.lost_at + LAPSED_S
            if helper.nodes and (has_lapsed or all(self._is_known_dead(name) for name in helper.nodes)):
                self.end_helper(helper)
            elif not helper.nodes and world.slurm_works and world.now >= helper.due:
                used = {node for other in self.helpers if not other.over for node in other.nodes}
                usable = world.usable_in_partition(self.excluded_nodes.union(self.allocated, used))
                if len(usable) >= helper.count:
                    helper.nodes = tuple(usable[: helper.count])
                    world.agents_on |= set(helper.nodes)
                    for name in helper.nodes:
                        world.by_name[name].is_new, world.by_name[name].signalled = True, False

    def _is_known_dead(self, name: str) -> bool:
        node = self.world.by_name[name]
        return node.died is not None and node.slurm_knows(self.world.now)

    def end(self, outcome: str, why: str) -> None:
        """End the run."""
        self.outcome, self.why = outcome, why
