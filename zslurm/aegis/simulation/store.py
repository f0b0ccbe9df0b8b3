"""Recovery in memory in the simulated world: the store server of an attempt, and its warm processes."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from zslurm.aegis.simulation.truth import AttemptTruth, NodeTruth, RankTruth
from zslurm.slurm.on_nodes.srun_output import TaskFailure
from zslurm.train.recovery.generation import Generation, failed, member_name, recovered

WARM_S, REGROUP_S = 4, 2
"""Seconds until a warm process is ready, and in which processes regroup."""


@dataclass
class StoreTruth:
    """The store server of an attempt: it outlives supervisors.

    Attributes:
        attempt: whose ranks it serves.
        processes: every process by its name among the members.
        members: the processes that are the ranks.
        newest: the newest generation; None before the first.
        before: the one before it in which the ranks trained.
        outcome: of the newest generation, once that is known.
        move: the planned move that waits for a boundary.
        gave_up: a generation has failed: the ranks lose their peers.
        reports: what the supervisor has not read yet.
        ends: failed warm processes that the supervisor has not read yet.
        warm: the processes that were ready at some time.
        coming: when which process is ready, on which node.
    """

    attempt: AttemptTruth
    processes: dict[str, RankTruth]
    members: list[str]
    newest: Generation | None = None
    before: Generation | None = None
    outcome: Mapping[str, Any] | None = None
    move: Generation | None = None
    gave_up: bool = False
    reports: list[Mapping[str, Any]] = field(default_factory=list)
    ends: list[tuple[str, TaskFailure]] = field(default_factory=list)
    all_ends: list[tuple[str, TaskFailure]] = field(default_factory=list)
    warm: list[str] = field(default_factory=list)
    coming: list[tuple[int, str, NodeTruth]] = field(default_factory=list)
    started: dict[str, int] = field(default_factory=dict)
    since: int = 0

    @classmethod
    def of(cls, attempt: AttemptTruth, per_node: int) -> StoreTruth:
        """Return the store of an attempt that begins."""
        members = [member_name(rank.node.name, number % per_node) for number, rank in enumerate(attempt.ranks)]
        return cls(attempt, dict(zip(members, attempt.ranks, strict=True)), members)

    @property
    def is_regrouping(self) -> bool:
        """Whether the ranks of the newest generation do not train yet."""
        return self.newest is not None and self.outcome is None

    def waiting_on(self, names: Collection[str]) -> list[RankTruth]:
        """Return the processes that wait on some nodes; those that are being started there do not get ready."""
        self.coming = [coming for coming in self.coming if coming[2].name not in names]
        return [
            process
            for name, process in self.processes.items()
            if process.node.name in names and process.ended is None and name not in self.members
        ]

    # --- what the supervisor does -------------------------------------------------------------------------------

    def start(self, nodes: list[NodeTruth], per_node: int, now: int) -> None:
        """Start warm processes; on a dead node none gets ready."""
        for node in nodes:
            self.started[node.name] = self.started.get(node.name, 0) + per_node
            for _ in range(per_node):
                name = member_name(node.name, f"w{sum(self.started.values()) * 100 + len(self.coming)}")
                self.coming.append((now + WARM_S, name, node))

    def publish(self, generation: Generation, now: int) -> None:
        """Take the generation of a fault, unless that of a move has its number."""
        if self.newest is not None and generation.number <= self.newest.number:
            reason = f"not after {self.newest.number}"
            self.reports.append({"event": "refused", "number": generation.number, "reason": reason})
        else:
            self._begin(generation, now)

    def adopted(self) -> dict[str, Any]:
        """Return what has happened, for another supervisor that reads everything from here on."""
        self.reports, self.ends = [], list(self.all_ends)
        shown = {"newest": self.newest, "before": self.before, "move": self.move}
        generations = {name: None if known is None else asdict(known) for name, known in shown.items()}
        return {**generations, "outcome": self.outcome, "unmoved": 0, "warm": list(self.warm)}

    # --- what happens -------------------------------------------------------------------------------------------

    def second(self, now: int, step_done: bool) -> None:
        """Let a second pass; `step_done`: the ranks have just finished a step."""
        for due, name, node in [each for each in self.coming if each[0] <= now]:
            self.coming.remove((due, name, node))
            if node.died is None:
                self.processes[name] = RankTruth(node, pid=10_000 + len(self.processes))
                self.warm.append(name)
                self.reports.append({"event": "warm", "member": name})
        if self.move is not None and step_done and not self.is_regrouping:
            move, self.move = self.move, None
            self._begin(move, now)
            self.reports.append({"event": "boundary", "number": move.number, "step": self.attempt.step})
        if self.newest is not None and self.outcome is None:
            self._regroup(self.newest, now)

    def _begin(self, generation: Generation, now: int) -> None:
        if self.outcome is not None and self.outcome["event"] == "recovered":
            self.before = self.newest
        self.newest, self.outcome, self.since, self.move = generation, None, now, None

    def _regroup(self, generation: Generation, now: int) -> None:
        processes = [self.processes[name] for name in generation.members]
        ready = all(each.ended is None and each.node.died is None and not each.hangs for each in processes)
        if ready and now >= self.since + REGROUP_S:
            self.members = list(generation.members)
            self.attempt.place(processes)
            for each in processes:
                each.loses_peers_at = None
            self.outcome = recovered(generation.number, self.attempt.step, 0, float(now - self.since))
        elif now > self.since + generation.deadline_s:
            self.outcome = failed(generation.number, None, "processes did not come")
            self.gave_up = True
        if self.outcome is not None:
            self.reports.append(self.outcome)

    def note_end(self, process: RankTruth, what: str) -> None:
        """Let Slurm notice that a warm process was killed."""
        name = next((name for name, other in self.processes.items() if other is process), "")
        if "/w" in name and what:
            end = name, TaskFailure(process.node.name, (0,), what)
            self.ends.append(end)
            self.all_ends.append(end)
