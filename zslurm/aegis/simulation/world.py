"""The simulated world: nodes, agents, ranks and Slurm, and the faults that happen to them.

The world knows the truth. The supervisor (supervisor.py) gets what it would see: reports of agents, what srun
prints, records of ranks, and Slurm's word. Time passes second by second.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from zslurm.aegis.fault_kinds import GPU_RAS_UNCORRECTABLE, NIC_LINK_DOWN
from zslurm.aegis.protocol import ProgressReport, RankProgress, Report, SensorReport, Stamp
from zslurm.aegis.simulation.store import StoreTruth
from zslurm.aegis.simulation.truth import AttemptTruth, NodeTruth, RankTruth
from zslurm.aegis.types import Fault
from zslurm.core.errors import Exit
from zslurm.core.reach import Reach
from zslurm.slurm.on_nodes.srun_output import TaskFailure
from zslurm.train.progress import Phase

WALL = 1_800_000_000.0
"""UNIX seconds at the beginning of the world."""

STEP_S, SAVE_EVERY, SETUP_S = 2, 10, 4
"""Seconds of a step, steps between two checkpoints, and seconds until the ranks train."""
PEERS_NOTICE_S, COLLECTIVE_TIMEOUT_S = 2, 40
"""Seconds until peers of a killed process lose their connection, and of one that only stands still."""
REQUEUE_S = 5
"""Seconds for which a requeued job waits at least."""
_KILLED_BY_S = 20
"""Seconds after which a supervisor is killed that has recorded nothing meanwhile."""
AGENT_START_S, KILL_S = 3, 1
"""Seconds in which an agent starts again, and in which killed ranks end."""

What = Literal[
    "rank_killed",
    "rank_hangs",
    "node_dies",
    "ecc_error",
    "nic_down",
    "agent_dies",
    "agent_stalls",
    "reports_late",
    "reports_twice",
    "slurm_away",
    "supervisor_killed",
    "job_suspended",
    "clock_jumps",
    "user_bug",
    "warm_killed",
    "drained",
    "move_asked",
    "time_is_up",
]
"""What may happen."""


@dataclass(frozen=True)
class Happening:
    """One thing that happens to the world.

    Attributes:
        at: seconds after the beginning.
        what: it is.
        where: number of the node, or of the rank; of a bug, the step after which it shows itself; of a killed
            supervisor, before or after how many more actions (even numbers: before one).
        lasts: seconds, for what has an end.
    """

    at: int
    what: What
    where: int = 0
    lasts: int = 0


class World:
    """Nodes, agents, ranks and Slurm, second by second."""

    def __init__(
        self,
        happenings: tuple[Happening, ...],
        *,
        nodes: int,
        ranks_per_node: int,
        total: int,
        in_memory: bool = False,
    ) -> None:
        """Prepare a partition of `nodes`, for a run of `total` steps that may recover `in_memory`."""
        self.happenings = sorted(happenings, key=lambda each: each.at)
        self.nodes = [NodeTruth(f"node{number}") for number in range(nodes)]
        self.by_name = {node.name: node for node in self.nodes}
        self.ranks_per_node, self.total = ranks_per_node, total
        self.now = 0
        self.committed = -1
        self.attempt: AttemptTruth | None = None
        self.attempts = 0
        self.bug: int | None = None
        self.slurm_away_until = 0
        self.suspended_until = 0
        self.awake = 0
        """Seconds in which the job was not suspended: agents count no others."""
        self.kill_supervisor: tuple[int, int] | None = None
        """Before or after how many more actions the supervisor is killed, and when at the latest."""
        self.agents_on: set[str] = set()
        """The nodes of the job."""
        self.inbox: list[tuple[int, Report]] = []
        """Reports on their way, and when they come."""
        self.guilty: dict[str, str] = {}
        """Nodes that are, or were, not fit to train, and why."""
        self.time_is_up = False
        """Slurm has warned the job of its time limit."""
        self.in_memory = in_memory
        self.store: StoreTruth | None = None
        """Of the attempt that runs, if it recovers in memory."""
        self.drained_until: dict[str, int] = {}
        """Nodes that Slurm drains, and until when."""
        self.moves_asked: list[tuple[str, str]] = []
        """Nodes that people ask the ranks to leave, and their requests."""

    # --- what happens -------------------------------------------------------------------------------------------

    @property
    def wall(self) -> float:
        """UNIX seconds."""
        return WALL + self.now

    @property
    def is_suspended(self) -> bool:
        """Whether every process of the job is stopped."""
        return self.now < self.suspended_until

    @property
    def slurm_answers(self) -> bool:
        """Whether slurmctld answers."""
        return self.now >= self.slurm_away_until

    def second(self) -> None:
        """Let one second pass."""
        self.now += 1
        while self.happenings and self.happenings[0].at <= self.now:
            self._happen(self.happenings.pop(0))
        if self.is_suspended:
            return
        self.awake += 1
        if self.attempt is not None and self.attempt.over is None:
            step = self.attempt.step
            self._train(self.attempt)
            if self.store is not None:
                self.store.second(self.now, self.attempt.step > step)
            self._print(self.attempt)
        ranks_on = self.attempt.ranks_on if self.attempt is not None else {}
        for node in self.nodes:
            if node.name in self.agents_on:
                self._report(node, ranks_on.get(node.name, ()))
            if self.now < node.silent_until and self._is_halted_by(node):
                self.guilty.setdefault(node.name, "its agent was silent while the ranks halted, as if it was dead")

    def _is_halted_by(self, node: NodeTruth) -> bool:
        """Return whether ranks halt, and nobody can see that this node is not the reason.

        A rank that hangs, or was killed for no reason that it could leave, may have lost its node as well.
        """
        ranks = self.attempt.ranks if self.attempt is not None else []
        return any(rank.hangs or rank.fault == "rank_killed" for rank in ranks) or node.nic_until > self.now

    def _happen(self, it: Happening) -> None:
        node = self.nodes[it.where % len(self.nodes)]
        if node.died is not None and it.what not in (
            "slurm_away",
            "supervisor_killed",
            "job_suspended",
            "user_bug",
        ):
            return
        match it.what:
            case "rank_killed" | "rank_hangs":
                self._harm_rank(it)
            case "node_dies":
                node.died = self.now
                self.guilty[node.name] = "it died"
            case "ecc_error":
                node.ecc = True
                self.guilty[node.name] = "its GPU loses data"
            case "nic_down":
                node.nic_until, node.nic_downs = max(node.nic_until, self.now + it.lasts), node.nic_downs + 1
                if it.lasts >= 15 or node.nic_downs > 1:
                    self.guilty[node.name] = "its link was down for long, or twice"
            case "agent_dies":
                node.silent_until = max(node.silent_until, self.now + AGENT_START_S)
            case "agent_stalls":
                node.silent_until = max(node.silent_until, self.now + it.lasts)
            case "reports_late":
                node.late_s = it.lasts
            case "reports_twice":
                node.twice = True
            case "clock_jumps":
                node.clock_off += float(it.lasts - 300)
            case "slurm_away":
                self.slurm_away_until = max(self.slurm_away_until, self.now + it.lasts)
            case "job_suspended":
                self.suspended_until = max(self.suspended_until, self.now + it.lasts)
            case "supervisor_killed":
                self.kill_supervisor = it.where, self.now + _KILLED_BY_S
            case "user_bug":
                self.bug = it.where
            case "time_is_up":
                self.time_is_up = True
            case "warm_killed":
                self._kill_warm(node)
            case "drained":
                self.drained_until[node.name] = self.now + it.lasts
                self.guilty.setdefault(node.name, "the site drains it")
            case "move_asked":
                self.moves_asked.append((node.name, f"request-{len(self.moves_asked)}"))
                self.guilty.setdefault(node.name, "a person asked the ranks to leave it")

    def _harm_rank(self, it: Happening) -> None:
        attempt = self.attempt
        if attempt is None or attempt.over is not None:
            return
        rank = attempt.ranks[it.where % len(attempt.ranks)]
        if rank.ended is not None or rank.node.died is not None:
            return
        rank.node.rank_ends += 1
        if rank.node.rank_ends >= 3:
            self.guilty[rank.node.name] = "ranks failed on it three times"
        if it.what == "rank_hangs":
            rank.hangs = True
        else:
            self._end(rank, "Killed", "rank_killed")

    def _kill_warm(self, node: NodeTruth) -> None:
        """Kill a process that waits on a node."""
        store = self.store
        if store is None or store.attempt.over is not None:
            return
        for name, process in store.processes.items():
            if process.node is node and process.ended is None and name not in store.members:
                self._end(process, "Killed", "rank_killed")
                return

    def _end(self, rank: RankTruth, what: str, fault: str, code: int = 137) -> None:
        if rank.ended is None:
            rank.ended, rank.what, rank.fault, rank.code = self.now, what, fault, code
            if self.store is not None:
                self.store.note_end(rank, what)

    def _train(self, attempt: AttemptTruth) -> None:
        """Let the ranks make progress: all of them, or none; those that wait for long lose their peers."""
        if self.now - attempt.began < SETUP_S:
            return
        if self.now - attempt.began == SETUP_S:
            attempt.awake = self.awake
        if not any(map(self._is_stuck, attempt.ranks)):
            attempt.worked_s += 1
            if attempt.halted:
                attempt.halted = False
                for rank in attempt.ranks:
                    rank.loses_peers_at = None
            if attempt.worked_s % STEP_S == 0:
                self._finish_step(attempt)
            return
        attempt.halted = True
        killed = any(rank.ended is not None and rank.code == 137 for rank in attempt.ranks)
        patience = PEERS_NOTICE_S if killed else COLLECTIVE_TIMEOUT_S
        if self.store is not None and not self.store.gave_up:
            if self.store.is_regrouping:
                return  # they wait for each other
            patience = COLLECTIVE_TIMEOUT_S  # they leave their collectives, and wait for a generation
        for rank in attempt.ranks:
            if rank.ended is not None or rank.node.died is not None or rank.hangs:
                continue
            due = self.now + patience
            rank.loses_peers_at = due if rank.loses_peers_at is None else min(due, rank.loses_peers_at)
            if self.now >= rank.loses_peers_at:
                self._end(rank, "Exited with exit code 1", "peer_lost", 1)

    def _is_stuck(self, rank: RankTruth) -> bool:
        """Return whether a rank finishes no step, so that no other one does."""
        node = rank.node
        return rank.ended is not None or rank.hangs or node.died is not None or node.nic_until > self.now

    def _finish_step(self, attempt: AttemptTruth) -> None:
        attempt.step += 1
        attempt.moved, attempt.awake, attempt.progressed = self.now, self.awake, True
        if self.bug is not None and attempt.step >= self.bug:
            self._end(attempt.ranks[0], "Exited with exit code 1", "user_error", 1)
            attempt.step -= 1
            return
        if attempt.step % SAVE_EVERY == 0 or attempt.is_asked:
            self.committed = attempt.step
        if attempt.step >= self.total:
            self.committed = self.total
            for rank in attempt.ranks:
                self._end(rank, "", "", 0)
        elif attempt.is_asked:
            for rank in attempt.ranks:
                self._end(rank, "Exited with exit code 75", "", int(Exit.INTERRUPTED))

    def _print(self, attempt: AttemptTruth) -> None:
        """Let srun print what it knows, a second late, and end once it knows of all tasks."""
        for number, rank in enumerate(attempt.tasks):
            if rank.ended is not None and rank.ended < self.now and not rank.reported and rank.node.died is None:
                rank.reported = True
                if rank.what:
                    attempt.log.append(TaskFailure(rank.node.name, (number,), rank.what))
        for node in attempt.nodes:
            if node.died is None:
                continue
            if node.slurm_knows(self.now) and self.slurm_answers and node.name not in attempt.failed_nodes:
                attempt.failed_nodes.append(node.name)
        others = attempt.others
        if others and all(rank.ended is not None and rank.code in (0, 75) for rank in attempt.ranks):
            attempt.over = self.now  # by their records
        elif all(rank.reported or rank.node.name in attempt.failed_nodes for rank in attempt.tasks) and all(
            rank.ended is not None or rank.node.name in attempt.failed_nodes for rank in others
        ):
            attempt.over = self.now

    # --- agents -------------------------------------------------------------------------------------------------

    def _report(self, node: NodeTruth, ranks: Sequence[int]) -> None:
        if node.died is not None or self.now < node.silent_until:
            return
        node.seq += 1
        stamp = Stamp(node.name, node.seq, WALL + self.now + node.clock_off, float(self.now))
        reports: list[Report] = []
        if (attempt := self.attempt) is not None:
            processes = ((number, attempt.ranks[number]) for number in ranks)
            rows = [
                self._row(number, rank, attempt)
                for number, rank in processes
                if rank.ended is None or rank.code == 137
            ]
            reports.append(ProgressReport(stamp, attempt.number, tuple(rows)))
        if node.is_new or node.ecc or node.nic_until > self.now or node.sensed:
            reports += self._sensor_reports(node, stamp)
        come = self.now + node.late_s
        for report in reports:
            self.inbox += [(come, report)] * (2 if node.twice else 1)

    def _row(self, number: int, rank: RankTruth, attempt: AttemptTruth) -> RankProgress:
        training = self.now - attempt.began >= SETUP_S
        age = self.awake - attempt.awake
        is_gone = rank.ended is not None
        return RankProgress(
            number,
            rank.pid or 1000 * attempt.number + number,
            Phase.STEP if training else Phase.SETUP,
            attempt.step if attempt.progressed else -1,
            self.committed,
            float(age),
            training and age > STEP_S and not rank.hangs and not is_gone,
            float(attempt.step),
            False,
            is_gone,
        )

    def _sensor_reports(self, node: NodeTruth, stamp: Stamp) -> list[Report]:
        """Return what sensors notice, once; a new agent's first reports have everything that is wrong."""
        ecc = Fault.of_kind(GPU_RAS_UNCORRECTABLE, stamp.t, "gpu", "uncorrectable error", node=node.name, gpu="3")
        down = Fault.of_kind(NIC_LINK_DOWN, stamp.t, "nic", "nic0 is down", node=node.name, nic="nic0")
        first, node.is_new = node.is_new, False
        reports: list[Report] = []
        for sensor, fault, is_wrong in (("gpu", ecc, node.ecc), ("nic", down, node.nic_until > self.now)):
            found: tuple[Fault, ...] = ()
            if is_wrong and (first or sensor not in node.sensed):
                found = (fault,)
            elif not is_wrong and sensor in node.sensed and not first:
                found = (replace(fault, cleared=True, line="nic0 is up"),)
            node.sensed = node.sensed | {sensor} if is_wrong else node.sensed - {sensor}
            if found or first:
                reports.append(SensorReport(stamp, sensor, faults=found, first=first))
        return reports

    def reach(self, node: NodeTruth) -> Reach:
        """Return how the port of a node's slurmd answers."""
        return "answers" if node.died is None else "nothing"

    def take_reports(self) -> list[tuple[int, Report]]:
        """Return the reports that have come by now."""
        come, self.inbox = self.inbox, []
        if any(node.late_s for node in self.nodes):
            self.inbox = [each for each in come if each[0] > self.now]
            come = [each for each in come if each[0] <= self.now]
        return come

    # --- what the supervisor does -------------------------------------------------------------------------------

    def start(self, nodes: list[str]) -> AttemptTruth:
        """Start an attempt on these nodes."""
        self.attempts += 1
        ranks = [RankTruth(self.by_name[name]) for name in nodes for _ in range(self.ranks_per_node)]
        self.attempt = AttemptTruth(
            self.attempts, self.now, ranks, max(0, self.committed), self.now, awake=self.awake
        )
        self.store = StoreTruth.of(self.attempt, self.ranks_per_node) if self.in_memory else None
        return self.attempt

    def kill_ranks(self, numbers: Collection[int]) -> None:
        """Kill ranks that hang, by their agents."""
        assert self.attempt is not None
        for number in numbers:
            self._end(self.attempt.ranks[number], "Killed", "rank_killed")

    def drained(self) -> dict[str, str]:
        """Return the nodes that Slurm drains, with the reason."""
        return {name: "maintenance" for name, until in self.drained_until.items() if until > self.now}

    def kill(self) -> None:
        """Kill every rank of the attempt, and end its step."""
        assert self.attempt is not None
        for rank in {id(rank): rank for rank in (*self.attempt.tasks, *self.attempt.ranks)}.values():
            if rank.node.died is None:
                self._end(rank, "", "")
        if self.store is not None:
            self.store.coming.clear()
        self.attempt.over = self.attempt.over or self.now

    def usable_in_partition(self, excluded: set[str]) -> list[str]:
        """Return the nodes that Slurm would give to a job now, for all that it knows."""
        return [node.name for node in self.nodes if node.name not in excluded and not node.slurm_knows(self.now)]
