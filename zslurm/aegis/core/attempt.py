"""The state of an attempt that runs: all that is known of its ranks, nodes and faults, owned by one object.

Only `step` (step.py) changes it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection
from dataclasses import dataclass, field, replace

from zslurm.aegis.core.detection.detector import Detector
from zslurm.aegis.core.detection.flight_records import Culprits
from zslurm.aegis.core.detection.nodes import NodeTable
from zslurm.aegis.core.messages import GiveUp, ProgressRead, StopState
from zslurm.aegis.core.policy.in_memory import InMemory
from zslurm.aegis.core.policy.outcome import AttemptOutcome
from zslurm.aegis.core.policy.shrinking import Weighed
from zslurm.aegis.core.root_cause import roots_of
from zslurm.aegis.fault_kinds import EARLY_EXIT, NODE_DEAD, SLURM_CANCELLED, STRAGGLER
from zslurm.aegis.types import OF_STEP, Alarm, AttemptSummary, Fault, History
from zslurm.config.aegis import AegisSection
from zslurm.slurm.on_nodes.srun_output import TaskFailure
from zslurm.train.recovery.generation import member_name, node_of

GONE = "its process is gone, by the agent of its node; its end was not reported"
"""What is recorded of a rank that only an agent reports to have ended."""

_SERIOUS = ("root", "cascade")
"""Roles of faults that can end an attempt. Of others there may be some for weeks: they must cost nothing."""


@dataclass
class HangState:
    """What is known of a hang; another one begins after each recovery.

    Attributes:
        examined: the witnesses were asked.
        culprits: ranks for which the others wait, by the flight recorders.
        behind: ranks that the RAS service shows behind the others.
        killed: ranks that were killed alone.
        until: when srun should have reported them (monotonic seconds); None while none was killed.
        pending: how the attempt is ended if the ranks that hang cannot be replaced.
        replaces: they are to be replaced; otherwise the witnesses are asked only for the record.
    """

    examined: bool = False
    culprits: tuple[Culprits, ...] = ()
    behind: frozenset[int] = frozenset()
    killed: frozenset[int] = frozenset()
    until: float | None = None
    pending: GiveUp | None = None
    replaces: bool = False


@dataclass(frozen=True)
class Move:
    """A planned move of the ranks of a node, or ranks that join.

    Attributes:
        off: the node that they leave; empty if ranks join.
        plan: who continues as them.
        ranks: which they are.
        number: of the generation in which they do.
        reason: why.
        request: the request that it answers, if a person asked.
    """

    off: str
    plan: InMemory
    ranks: tuple[int, ...]
    number: int
    reason: str
    request: str | None = None


@dataclass
class MoveWish:
    """A node to leave.

    Attributes:
        node: its name.
        reason: why.
        request: of a person; None if the policy wants it.
        since: when it was noted (monotonic seconds).
        tries: moves that were begun for it.
    """

    node: str
    reason: str
    request: str | None
    since: float
    tries: int = 0


@dataclass
class MovesState:
    """The nodes that the ranks of an attempt should leave as planned.

    Attributes:
        answered: requests, and nodes of them, that have been answered.
        wishes: nodes to leave, one after the other.
        signs: faults that may be a reason; those that the run overcame among them.
        known: what the policy has wanted once: not again if it was refused.
        drained: nodes that Slurm drains.
    """

    answered: frozenset[tuple[str | None, str]] = frozenset()
    wishes: list[MoveWish] = field(default_factory=list)
    signs: list[Fault] = field(default_factory=list)
    known: set[tuple[str, str]] = field(default_factory=set)
    drained: set[str] = field(default_factory=set)

    @property
    def nodes(self) -> frozenset[str]:
        """The nodes that the ranks are about to leave, so that the attempt need not be ended for a slow one."""
        return frozenset(wish.node for wish in self.wishes)


@dataclass
class Regrouping:
    """One recovery in memory that is under way: from the first lost rank until the ranks train, or must not.

    A further lost rank makes a further generation of the same recovery.

    Attributes:
        began: when (monotonic seconds).
        deadline: when its newest generation has failed (monotonic seconds).
        lost: ranks whose process is another one afterwards, or that are left out.
        dead: nodes that died.
        plan: of the newest generation; empty while none is published.
        awaits_warm: too few processes are ready, and more are being started.
        awaits_check: the spare that a plan needs is being checked.
        plan_again: something else has changed than the ranks that are lost: plan with what there is now.
        replacements_lost: processes that were lost on their way in.
        resizes: a generation of it has another number of ranks than the last one that trained.
    """

    began: float
    deadline: float
    lost: set[int] = field(default_factory=set)
    dead: set[str] = field(default_factory=set)
    plan: InMemory = field(default_factory=InMemory)
    awaits_warm: bool = False
    awaits_check: bool = False
    plan_again: bool = False
    replacements_lost: int = 0
    resizes: bool = False

    @property
    def planned_members(self) -> tuple[str, ...]:
        """The members of the newest generation; none if it has another number of ranks."""
        return () if self.plan.former else self.plan.members


@dataclass
class MemoryState:
    """Recovery in memory of an attempt: its processes, and the generation that is under way.

    Attributes:
        per_node: ranks of a node.
        members: the process of each rank, NODE/SLOT.
        spares: nodes without ranks that may be used.
        checks_spares: a spare is checked before ranks are placed on it; otherwise every spare is fit.
        left: nodes that ranks have left: as planned, or for a fault of the node.
        expelled: nodes that the ranks leave for a fault, with its description.
        told: those of them whose ranks were recorded to leave.
        number: of the newest generation.
        ended: ranks that hung, and were killed alone, since the last recovery.
        given_up: nothing is recovered in memory in this attempt, or not any more.
        regrouping: the recovery that is under way.
        waiting: processes that are ready and have no rank, by node.
        coming: how many are being started, by node.
        came: processes that are not being started any more: they are ready, or have failed.
        warm_started: the first of them were started.
        move: the planned move that is under way; a fault may come before it.
        overtaken: a move in whose place a fault's generation was published; the ranks may have reached its
            boundary at the same moment, and the server published that generation first.
        held_in_vain: the ranks have held for a move in vain: before the next generation they do not do so again.
        announced: it was recorded that lost ranks can be replaced.
        recovered_at: the step to which the last recovery went back; -1 if there was none.
        tries: recoveries since that step.
        trained: the step that an earlier supervisor has seen finished; -1 if there is none.
        checks: each spare that is checked, with the reason why it is unfit; None until that is known.
        check_round: a number of the checks: checks of earlier recoveries do not count.
        unfit: spares that a check found unfit.
        fewer: why the ranks must not continue on that number of nodes; empty if they may.
        weighed: that number of nodes against a wait in the queue.
        wanted: nodes that the ranks should have: those that are missing are asked of a helper job; 0: none is.
        weighs_helper: one is asked for only if it costs less than to train on without it.
        helpers: helper jobs that have started, with their nodes.
        awaits_helper: one is asked for, and has not started yet.
        ask_at: when the next one may be asked for (monotonic seconds).
        ended_helpers: nodes of helper jobs that are over.
    """

    per_node: int
    members: list[str]
    spares: tuple[str, ...] = ()
    checks_spares: bool = False
    left: set[str] = field(default_factory=set)
    expelled: dict[str, str] = field(default_factory=dict)
    told: set[str] = field(default_factory=set)
    number: int = 0
    ended: set[int] = field(default_factory=set)
    given_up: bool = False
    regrouping: Regrouping | None = None
    waiting: dict[str, list[str]] = field(default_factory=dict)
    coming: Counter[str] = field(default_factory=Counter)
    came: set[str] = field(default_factory=set)
    warm_started: bool = False
    move: Move | None = None
    overtaken: Move | None = None
    held_in_vain: bool = False
    announced: bool = False
    recovered_at: int = -1
    tries: int = 0
    trained: int = -1
    checks: dict[str, str | None] = field(default_factory=dict)
    check_round: int = 0
    unfit: set[str] = field(default_factory=set)
    fewer: dict[int, str] = field(default_factory=dict)
    weighed: dict[int, Weighed] = field(default_factory=dict)
    wanted: int = 0
    weighs_helper: bool = False
    helpers: dict[str, tuple[str, ...]] = field(default_factory=dict)
    awaits_helper: bool = False
    ask_at: float = 0.0
    ended_helpers: set[str] = field(default_factory=set)

    @classmethod
    def of_start(cls, rank_nodes: Collection[str], per_node: int, spares: tuple[str, ...]) -> MemoryState:
        """Return the state at the start of an attempt with ranks on these nodes."""
        members = [member_name(node, rank % per_node) for rank, node in enumerate(rank_nodes)]
        return cls(per_node, members, spares)

    @property
    def active(self) -> bool:
        """Whether the ranks regroup now, so that nothing else must be done about them."""
        return self.regrouping is not None

    def ready_or_coming(self, node: str) -> int:
        """Return how many processes wait on a node, or are being started there."""
        return len(self.waiting.get(node, ())) + self.coming[node]

    @property
    def nodes_of_helpers(self) -> list[str]:
        """The nodes of helper jobs."""
        return [node for nodes in self.helpers.values() for node in nodes]

    def leave(self, node: str) -> None:
        """Note that the ranks have left a node: processes that wait there end by themselves."""
        self.left.add(node)
        self.expelled.pop(node, None)
        self.waiting.pop(node, None)

    def add_warm(self, member: str) -> None:
        """Note that a process is ready."""
        self.end_start(member)
        if node_of(member) not in self.left:
            self.waiting.setdefault(node_of(member), []).append(member)

    def take_warm(self, members: Collection[str]) -> None:
        """Note that these processes are ranks now, or gone."""
        self.waiting = {
            node: unused
            for node, waiting in self.waiting.items()
            if (unused := [member for member in waiting if member not in members])
        }

    def end_start(self, member: str) -> None:
        """Note that a process is no longer being started: it is ready, or has failed."""
        if member not in self.came:
            self.came.add(member)
            node = node_of(member)
            self.coming[node] = max(0, self.coming[node] - 1)


@dataclass
class AttemptState:
    """An attempt that runs.

    Attributes:
        settings: the section `aegis` of the run.
        number: of the attempt.
        nodes: on which it runs, in the order of ranks.
        rank_nodes: the node of each rank.
        detector: makes faults of what agents report; it outlives the attempt.
        has_agents: the run has agents.
        on_slurm: its job is one of Slurm: srun reports the ends of ranks, and not zslurm's own launcher.
        own_node: the node that the supervisor itself runs on; None if it is not known.
        history: of the run, until the attempt began.
        spares: healthy nodes of the job that it does not use.
        reported: sensors that cannot read, each recorded once in this start of the job.
        faults: what was noticed so far, without what the run overcame.
        failures: the bad ends of ranks so far.
        failed_at: when the first rank failed (monotonic seconds); None while none has.
        lost: ranks that have ended badly and that no recovery in memory has replaced since.
        replaced: ranks that one has replaced.
        overcome_nodes: nodes that died, and whose ranks are elsewhere now.
        ends_taken: how many bad ends of tasks were taken from srun's output.
        asked_before: an earlier supervisor has asked this attempt to stop.
        killed_before: an earlier supervisor has ended the step.
        stop: the request to save and stop.
        stop_later_s: how much later than its deadline the ranks must have saved: the supervisor was stopped.
        progress: how far the run was when that was read last.
        alarm: what the policy makes of the faults, as of the last assessment.
        hang: the hang that is known, if there is one.
        memory: recovery in memory; None if the attempt has none.
        moves: nodes that the ranks should leave as planned.
        cleared_at: when every process of it was ended, once it is over (monotonic seconds); None before.
        unconfirmed: nodes and sensors whose faults an earlier supervisor recorded, and until when the first
            report of the next agent is awaited (UNIX seconds): the faults may be over.
    """

    settings: AegisSection
    number: int
    nodes: tuple[str, ...]
    rank_nodes: list[str]
    detector: Detector
    has_agents: bool = True
    on_slurm: bool = True
    own_node: str | None = None
    history: History = field(default_factory=History)
    spares: int = 0
    reported: set[tuple[str, bool]] = field(default_factory=set)
    faults: list[Fault] = field(default_factory=list)
    failures: list[TaskFailure] = field(default_factory=list)
    failed_at: float | None = None
    lost: set[int] = field(default_factory=set)
    replaced: set[int] = field(default_factory=set)
    overcome_nodes: set[str] = field(default_factory=set)
    ends_taken: int = 0
    asked_before: bool = False
    killed_before: bool = False
    stop: StopState = field(default_factory=StopState)
    stop_later_s: float = 0.0
    progress: ProgressRead = field(default_factory=lambda: ProgressRead(-1, None))
    alarm: Alarm = field(default_factory=lambda: Alarm(give_up=False))
    hang: HangState = field(default_factory=HangState)
    memory: MemoryState | None = None
    moves: MovesState = field(default_factory=MovesState)
    cleared_at: float | None = None
    unconfirmed: dict[tuple[str | None, str], float] = field(default_factory=dict)
    changes: list[tuple[frozenset[int], bool]] = field(default_factory=list)
    """The ranks that each recovery has replaced, and whether it has left them out instead."""
    left_in_order: set[int] = field(default_factory=set)
    """Ranks that recorded an end in order, and whose progress is still there."""
    assessed: int = 0
    """How many faults there were at the last assessment."""
    assess_at: float = 0.0
    """When the same faults are assessed again (monotonic seconds): only time passes."""

    @property
    def asked(self) -> bool:
        """Whether the ranks were asked to stop."""
        return self.stop.asked or self.asked_before

    @property
    def cancelled(self) -> Fault | None:
        """The fault that the step was cancelled; None if that is not known."""
        of_step = (fault for fault in self.faults if fault.source in OF_STEP)
        return next((fault for fault in of_step if fault.kind == SLURM_CANCELLED), None)

    @property
    def early_exits(self) -> list[Fault]:
        """Ranks that exited too early by what srun did not report, and not by a record of the rank."""
        return [fault for fault in self.faults if fault.kind == EARLY_EXIT and fault.source in OF_STEP]

    @property
    def dead_nodes(self) -> set[str]:
        """Nodes that are known to be dead."""
        return self.overcome_nodes | {
            fault.node for fault in self.faults if fault.kind == NODE_DEAD and fault.node is not None
        }

    @property
    def alive(self) -> list[str]:
        """The nodes of the attempt that are not known to be dead."""
        dead = self.dead_nodes
        return [node for node in self.nodes if node not in dead]

    @property
    def nodes_heard(self) -> NodeTable:
        """The table of nodes."""
        return self.detector.nodes

    def awaits_nodes(self, now: float) -> bool:
        """Return whether it is not known yet, after the end of the attempt, which of its nodes are dead.

        Nodes often die together, and the last reports of their agents come a second apart. Each one that misses
        heartbeats is heard again, or found dead; an attempt on the node that is found last would be lost.
        """
        nodes = self.nodes_heard
        if self.cleared_at is None or now >= self.cleared_at + self.settings.heartbeat_timeout_s:
            return False
        return nodes.any_responding(now) and not nodes.silent(nodes.patience_s, now).isdisjoint(self.alive)

    @property
    def has_serious_faults(self) -> bool:
        """Whether a fault is known that may end the attempt."""
        return any(fault.role in _SERIOUS or fault.kind == STRAGGLER for fault in self.faults)

    def is_assessment_due(self, now: float) -> bool:
        """Return whether the faults are to be assessed: there are others, or some time has passed."""
        return len(self.faults) != self.assessed or now >= self.assess_at

    def needs_progress(self, now: float) -> bool:
        """Return whether the next `Tick` depends on how far the run is; reading that takes files."""
        return self.has_serious_faults and (self.failed_at is not None or self.is_assessment_due(now))

    def summary(self, wall: float, outcome: AttemptOutcome | None = None) -> AttemptSummary:
        """Return what the policy decides on; `outcome` is how the attempt ended, if it has."""
        return AttemptSummary(
            wall,
            self.number,
            outcome.outcome if outcome is not None else None,
            tuple(sorted(self.faults, key=lambda fault: fault.time)),
            self.progress.committed_step,
            self.stop.name,
            self.stop.requeued,
            preempted=self.stop.preempted,
            nodes=self.nodes,
            progressed_at=self.progress.progressed_at,
        )

    def confirmed_summary(self, wall: float) -> AttemptSummary:
        """Return the summary without faults that may be over, for all that the present agents have reported."""
        summary = self.summary(wall)
        if not any(wall < until for until in self.unconfirmed.values()):
            return summary
        faults = [f for f in summary.faults if wall >= self.unconfirmed.get((f.node, f.source), wall)]
        return replace(summary, faults=tuple(faults))

    def has_root(self, wall: float, outcome: AttemptOutcome | None = None) -> bool:
        """Return whether something is known that may be why the attempt ended, or ends."""
        if not any(fault.role == "root" for fault in self.faults):
            return False
        return any(fault.role == "root" for fault in roots_of(self.summary(wall, outcome), self.settings))

    def rank_of(self, task: int) -> int | None:
        """Return the rank that a task of the step is now; None if it is none any more."""
        rank = task
        for gone, left_out in self.changes:
            if rank in gone:
                return None
            rank -= sum(gone_rank < rank for gone_rank in gone) if left_out else 0
        return rank

    def of_ranks(self, failure: TaskFailure) -> TaskFailure | None:
        """Return a failure of tasks of the step as one of ranks; None if they are none any more.

        Of a rank that was replaced the step has the former process only: it froze, or was cut off, and ends when
        it finds out; or Slurm learns late that its node is dead. The rank trains elsewhere.
        """
        ranks = tuple(rank for task in failure.ranks if (rank := self.rank_of(task)) is not None)
        return replace(failure, ranks=ranks) if ranks else None

    def without_reports_of(self, ranks: Collection[int]) -> list[TaskFailure]:
        """Return the bad ends without those that only agents reported of these ranks."""
        return [
            reduced for reduced in self.failures if reduced.what != GONE or not set(reduced.ranks) & set(ranks)
        ]
