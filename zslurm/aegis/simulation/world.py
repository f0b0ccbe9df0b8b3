"""The simulated world: nodes, agents, ranks and Slurm, and the faults that happen to them.

The world knows the truth. The supervisor (supervisor.py) gets what it would see: reports of agents, what srun
prints, records of ranks, and Slurm's word. Time passes second by second.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from zslurm.aegis.fault_kinds import GPU_RAS_UNCORRECTABLE, NIC_LINK_DOWN
from zslurm.aegis.protocol import AgentReport, ProgressReport, RankProgress, Report, SensorReport, Stamp
from zslurm.aegis.simulation.store import StoreTruth
from zslurm.aegis.simulation.truth import AttemptTruth, NodeTruth, RankTruth
from zslurm.aegis.types import Fault
from zslurm.core.errors import Exit
from zslurm.core.reach import Reach
from zslurm.slurm.on_nodes.srun_output import TaskFailure
from zslurm.train.progress import Phase

WALL = 1_800_000_000.0
"""UNIX seconds at the beginning of the world."""

STEP_S, SAVE_EVERY, SETUP_S, SAVE_S = 2, 10, 4, 3
"""Seconds of a step, steps between two checkpoints, seconds until the ranks train, and until one is complete."""
PEERS_NOTICE_S, COLLECTIVE_TIMEOUT_S = 2, 40
"""Seconds until peers of a killed process lose their connection, and of one that only stands still."""
_KILLED_BY_S = 20
"""Seconds after which a supervisor is killed that has recorded nothing meanwhile."""
HELD_S = 8
"""Seconds for which a report is sent again before its agent is given up (`aegis.heartbeat_timeout_s`)."""
CHECK_EVERY = 3
"""Steps after which numbers are checked (`integrity.every_steps`)."""
AGENT_START_S, KILL_S = 3, 1
"""Seconds in which an agent starts again, and in which killed ranks end."""

What = Literal[
    "rank_killed",
    "rank_hangs",
    "node_dies",
    "ecc_error",
    "numbers_wrong",
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
    "preempted",
    "requeue_refused",
    "exclusion_refused",
    "answers_unknown",
    "answers_late",
    "called_down",
    "cut_off",
    "helper_refused",
    "helper_ends",
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
        lasts: seconds, for what has an end; of a preemption its grace time; of late answers how late they are.
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
        self.saving: tuple[int, int] | None = None
        """The step of a checkpoint that is being written while the ranks train on, and when it is complete."""
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
        self.batch = self.nodes[0].name
        """The node on which the job's script runs, and the srun of its ranks."""
        self.inbox: list[tuple[int, Report]] = []
        """Reports on their way, and when they come."""
        self.arrive_later = False
        """Reports may come later than in the second in which they are sent."""
        self.cut_off_until = 0
        """When every node has its connections again."""
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
        self.preempted_until: int | None = None
        """When the grace time of a preemption is over; None while Slurm does not preempt the job."""
        self.refuses_requeue_until = self.refuses_exclusion_until = 0
        self.refuses_helper_until = 0
        self.ends_helpers = False
        """Somebody cancels every helper job."""
        self.unknown_until = 0
        """Until when every question to Slurm, and about the port of a node, is answered with "unknown"."""
        self.answers_from = 0
        """So many seconds old is what Slurm answers."""

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
    def slurm_works(self) -> bool:
        """Whether slurmctld works."""
        return self.now >= self.slurm_away_until

    def slurm_answers(self, name: str) -> bool:
        """Return whether Slurm answers a question from a node."""
        is_known = self.slurm_works and self.now >= self.unknown_until
        return is_known and not self.by_name[name].is_cut_off(self.now)

    def is_called_down(self, node: NodeTruth) -> bool:
        """Return whether Slurm's answer calls a node down; the answer may be old."""
        return node.slurm_knows(max(0, self.now - self.answers_from))

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
        training = None if self.attempt is None else self._progress(self.attempt)
        for node in self.nodes:
            if self.now < node.silent_until:
                self._judge_silent(node)
            elif node.name in self.agents_on and node.died is None:
                self._report(node, ranks_on.get(node.name, ()), training)

    def _judge_silent(self, node: NodeTruth) -> None:
        """Note what nobody can tell from a fault of a node whose agent is silent."""
        if self._is_halted_by(node):
            self.guilty.setdefault(node.name, "its agent was silent while the ranks halted, as if it was dead")
        if self.is_called_down(node):
            self.guilty.setdefault(node.name, "Slurm called it down while its agent was silent")

    def _is_halted_by(self, node: NodeTruth) -> bool:
        """Return whether ranks halt, and nobody can see that this node is not the reason.

        A rank that hangs, or was killed for no reason that it could leave, may have lost its node as well. If
        nobody answers a question, two nodes that are silent at the same time look the same.
        """
        ranks = self.attempt.ranks if self.attempt is not None else []
        is_one_away = self.now < self.unknown_until and any(other.is_away(self.now) for other in self.nodes)
        is_stuck = any(rank.hangs or rank.fault == "rank_killed" for rank in ranks)
        return is_stuck or is_one_away or node.is_away(self.now)

    def _happen(self, it: Happening) -> None:
        node = self.nodes[it.where % len(self.nodes)]
        if node.died is not None and it.what not in (
            *("rank_killed", "rank_hangs"),
            "slurm_away",
            "supervisor_killed",
            *("job_suspended", "user_bug", "preempted", "requeue_refused", "exclusion_refused"),
            *("answers_unknown", "answers_late", "time_is_up", "helper_refused", "helper_ends"),
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
            case "numbers_wrong":
                node.computes_wrong = True
                self.guilty[node.name] = "its GPU computes other numbers"
            case "nic_down":
                node.nic_until, node.nic_downs = max(node.nic_until, self.now + it.lasts), node.nic_downs + 1
                if it.lasts >= 15 or node.nic_downs > 1:
                    self.guilty[node.name] = "its link was down for long, or twice"
            case "agent_dies":
                node.silent_until = max(node.silent_until, self.now + AGENT_START_S)
            case "agent_stalls":
                node.silent_until = max(node.silent_until, self.now + it.lasts)
            case "reports_late":
                node.late_s, self.arrive_later = it.lasts, True
                if node.nic_until > self.now:
                    self.guilty.setdefault(node.name, "it is reported late that its link is up again")
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
            case "preempted":
                self._preempt(it.lasts)
            case "requeue_refused":
                self.refuses_requeue_until = max(self.refuses_requeue_until, self.now + it.lasts)
            case "helper_refused":
                self.refuses_helper_until = max(self.refuses_helper_until, self.now + it.lasts)
            case "helper_ends":
                self.ends_helpers = True
            case "exclusion_refused":
                self.refuses_exclusion_until = max(self.refuses_exclusion_until, self.now + it.lasts)
            case "answers_unknown":
                self.unknown_until = max(self.unknown_until, self.now + it.lasts)
            case "answers_late":
                self.answers_from = it.lasts
            case "called_down":
                node.called_down_until = max(node.called_down_until, self.now + it.lasts)
            case "cut_off":
                if not node.is_cut_off(self.now):
                    node.cut_off_at = self.now
                node.cut_off_until = max(node.cut_off_until, self.now + it.lasts)
                self.cut_off_until, self.arrive_later = max(self.cut_off_until, node.cut_off_until), True
                self.guilty.setdefault(node.name, "it was cut off from all others")
                job = [node for node in self.nodes if node.name in self.agents_on and node.died is None]
                if sum(self.now >= node.silent_until for node in job) <= 2:
                    for member in job:
                        self.guilty.setdefault(member.name, "nobody can tell which of two nodes is cut off")
            case "warm_killed":
                self._kill_warm(node)
            case "drained":
                self.drained_until[node.name] = self.now + it.lasts
                self.guilty.setdefault(node.name, "the site drains it")
            case "move_asked":
                self.moves_asked.append((node.name, f"request-{len(self.moves_asked)}"))
                self.guilty.setdefault(node.name, "a person asked the ranks to leave it")

    def _preempt(self, grace_s: int) -> None:
        """Begin a grace time: Slurm signals the processes of the job's steps, and nothing else."""
        if not self.agents_on or self.preempted_until is not None:
            return
        self.preempted_until = self.now + grace_s
        for name in self.agents_on:
            self.by_name[name].signalled = True
        if self.attempt is not None and self.attempt.over is None:
            self.attempt.is_asked = True

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
            if self.saving is not None and self.now >= self.saving[1]:
                self.committed, self.saving = self.saving[0], None
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
                self.saving = None  # a part of it is lost
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
        return rank.ended is not None or rank.hangs or rank.node.is_away(self.now)

    def _finish_step(self, attempt: AttemptTruth) -> None:
        attempt.step += 1
        attempt.moved, attempt.awake, attempt.progressed = self.now, self.awake, True
        if self.bug is not None and attempt.step >= self.bug:
            self._end(attempt.ranks[0], "Exited with exit code 1", "user_error", 1)
            attempt.step -= 1
            return
        if attempt.step % CHECK_EVERY == 0 and self._check_numbers(attempt):
            return
        if attempt.is_asked:
            self.committed, self.saving = attempt.step, None
        elif attempt.step % SAVE_EVERY == 0:
            self.saving = attempt.step, self.now + SAVE_S
        if attempt.step >= self.total:
            self.committed, self.saving = self.total, None
            for rank in attempt.ranks:
                self._end(rank, "", "", 0)
        elif attempt.is_asked:
            for rank in attempt.ranks:
                self._end(rank, "Exited with exit code 75", "", int(Exit.INTERRUPTED))

    def _check_numbers(self, attempt: AttemptTruth) -> bool:
        """End all ranks if one of them computes wrong, as `integrity.every_steps` does; return whether."""
        if not any(rank.node.computes_wrong for rank in attempt.ranks):
            return False
        for rank in attempt.ranks:
            self._end(rank, "Exited with exit code 1", "numbers_wrong", 1)
        attempt.step -= 1
        return True

    def _print(self, attempt: AttemptTruth) -> None:
        """Let srun print what it knows, a second late, and end once it knows of all tasks."""
        for number, rank in enumerate(attempt.tasks):
            if rank.ended is None or rank.ended >= self.now or rank.reported or rank.node.died is not None:
                continue
            if self.are_connected(rank.node.name, self.batch):
                rank.reported = True
                if rank.what:
                    attempt.log.append(TaskFailure(rank.node.name, (number,), rank.what))
        is_told = self.slurm_works and not self.by_name[self.batch].is_cut_off(self.now)
        for node in attempt.nodes if is_told else ():
            is_lost = node.died is not None or (node.cut_off_until and node.is_cut_off(self.now))
            if is_lost and node.slurm_knows(self.now) and node.name not in attempt.failed_nodes:
                attempt.failed_nodes.append(node.name)
                for rank in attempt.tasks:
                    if rank.node is node:
                        self._end(rank, "", "")  # Slurm ends what is left of the step there
        others = attempt.others
        is_replaced = bool(others) or len(attempt.ranks) < len(attempt.tasks)
        if is_replaced and all(rank.ended is not None and rank.code in (0, 75) for rank in attempt.ranks):
            attempt.over = self.now  # by their records
        elif all(rank.reported or rank.node.name in attempt.failed_nodes for rank in attempt.tasks) and all(
            rank.ended is not None or rank.node.name in attempt.failed_nodes for rank in others
        ):
            attempt.over = self.now

    # --- agents -------------------------------------------------------------------------------------------------

    def _report(self, node: NodeTruth, ranks: Sequence[int], training: RankProgress | None) -> None:
        """Send what the agent of a node reports in this second; `training` as in `_row`."""
        node.seq += 1
        stamp = Stamp(node.name, node.seq, WALL + self.now + node.clock_off, float(self.now))
        reports: list[Report] = []
        if (attempt := self.attempt) is not None and training is not None:
            rows = []
            for number in ranks:
                rank = attempt.ranks[number]
                if rank.ended is None or rank.code == 137:
                    rows.append(_row(number, rank, training))
            reports.append(ProgressReport(stamp, attempt.number, tuple(rows)))
        if node.is_new or node.ecc or node.nic_until > self.now or node.sensed:
            reports += self._sensor_reports(node, stamp)
        come = self.now + node.late_s
        if node.signalled:
            reports.append(AgentReport(stamp, "signalled"))
            node.signalled = False
        for report in reports:
            self.inbox += [(come, report)] * (2 if node.twice else 1)

    def _progress(self, attempt: AttemptTruth) -> RankProgress:
        """Return the record of a rank that does its part, without its number and process."""
        training = self.now - attempt.began >= SETUP_S
        age = self.awake - attempt.awake
        return RankProgress(
            -1,
            0,
            Phase.STEP if training else Phase.SETUP,
            attempt.step if attempt.progressed else -1,
            self.committed,
            float(age),
            training and age > STEP_S,
            float(attempt.step),
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
        if self.now < self.unknown_until:
            return "unknown"
        return "nothing" if node.died is not None or node.is_cut_off(self.now) else "answers"

    def take_reports(self, name: str, *, is_former: bool = False) -> list[tuple[int, Report]]:
        """Return the reports that have come by now to a supervisor on a node.

        Of the agents of a former supervisor only the one on its own node still runs.
        """
        come, self.inbox = self.inbox, []
        if is_former:
            self.inbox = [report for report in come if report[1].stamp.node != name]
            return [report for report in come if report[1].stamp.node == name]
        if self.arrive_later:
            self.inbox = [report for report in come if report[0] > self.now]
            come = [report for report in come if report[0] <= self.now]
        if self.now < self.cut_off_until:
            for _, report in come:
                if not self.are_connected(report.stamp.node, name):
                    self._hold(report)
            come = [report for report in come if self.are_connected(report[1].stamp.node, name)]
        return come

    def _hold(self, report: Report) -> None:
        """Send a report again that did not arrive; an agent that is not heard for long is replaced."""
        if self.now - report.stamp.mono < HELD_S:
            self.inbox.append((self.now + 1, report))
        else:
            self.by_name[report.stamp.node].is_new = True

    def are_connected(self, one: str, other: str) -> bool:
        """Return whether two nodes reach each other."""
        if self.now >= self.cut_off_until:
            return True
        ends = self.by_name[one], self.by_name[other]
        return one == other or not any(node.is_cut_off(self.now) for node in ends)

    # --- what the supervisor does -------------------------------------------------------------------------------

    def start(self, nodes: list[str]) -> AttemptTruth:
        """Start an attempt on these nodes."""
        self.attempts, self.saving = self.attempts + 1, None
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

    def kill(self, unless_on: str = "") -> None:
        """Kill every rank of the attempt, and end its step; not on a node that cannot be reached."""
        assert self.attempt is not None
        for rank in {id(rank): rank for rank in (*self.attempt.tasks, *self.attempt.ranks)}.values():
            if rank.node.died is None and rank.node.name != unless_on:
                self._end(rank, "", "")
        if self.store is not None:
            self.store.coming.clear()
        if not unless_on:
            self.attempt.over = self.attempt.over or self.now

    def kill_on(self, names: Collection[str]) -> None:
        """Kill every process of the attempt on some nodes, whose job ends."""
        if self.attempt is None or self.attempt.over is not None:
            return
        for rank in self.attempt.ranks:
            if rank.node.name in names and rank.node.died is None:
                self._end(rank, "Killed", "rank_killed")
        if self.store is not None:
            for process in self.store.waiting_on(names):
                self._end(process, "Killed", "rank_killed")

    def usable_in_partition(self, excluded: set[str]) -> list[str]:
        """Return the nodes that Slurm would give to a job now, for all that it knows."""
        return [node.name for node in self.nodes if node.name not in excluded and not node.slurm_knows(self.now)]


def _row(number: int, rank: RankTruth, training: RankProgress) -> RankProgress:
    """Return the record of a rank; `training` is that of one that does its part."""
    is_gone = rank.ended is not None
    return RankProgress(
        number,
        rank.pid,
        training.phase,
        training.step,
        training.committed_step,
        training.age_s,
        training.waiting and not rank.hangs and not is_gone,
        training.work_s,
        False,
        is_gone,
    )
