"""The supervisor in the simulated world: it turns what happens into events for the core, and carries actions out.

It decides nothing: `step` and `decide` do. It keeps what the real one keeps on disk, the rows of the events, and
forgets the rest when it is killed.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection
from dataclasses import dataclass, field
from typing import Any, Literal

from zslurm.aegis.core.adopted_memory import KINDS, FoundMemory, found_memory
from zslurm.aegis.core.attempt import AttemptState, MemoryState, MovesState
from zslurm.aegis.core.detection.detector import Detector
from zslurm.aegis.core.detection.witnesses import WitnessReport
from zslurm.aegis.core.following import (
    AttemptOver,
    CheckSpares,
    CountNodes,
    DecisionFound,
    EndRun,
    FindNodes,
    FollowAction,
    FollowEvent,
    FollowState,
    NodesCounted,
    NodesFound,
    ReadRun,
    Requeue,
    RequeueTried,
    RunRead,
    SparesExamined,
    StartAgain,
    StopBetween,
    follow,
)
from zslurm.aegis.core.messages import (
    AskAbout,
    CheckSpare,
    Cleared,
    CoreAction,
    CoreEvent,
    DrainsRead,
    EndRead,
    ExamineHang,
    Exclude,
    FaultsFound,
    FewerWeighed,
    GiveUp,
    HangExamined,
    HoldForMove,
    KillRanks,
    MemoryResumed,
    MoveRequested,
    NodeAskedAbout,
    Paused,
    ProgressRead,
    RanksFailed,
    RanksKilled,
    ReadEnd,
    ReadLastWords,
    Record,
    Regroup,
    ReportReceived,
    Resumed,
    SlurmAnswered,
    SparesChecked,
    StartWarm,
    StopChanged,
    StopState,
    StoreReported,
    Tick,
    WarmEnded,
    WeighFewer,
)
from zslurm.aegis.core.policy.history import history_of
from zslurm.aegis.core.policy.outcome import AttemptOutcome
from zslurm.aegis.core.step import step
from zslurm.aegis.fault_kinds import PEER_LOST, RANK_KILLED, USER_ERROR
from zslurm.aegis.simulation.truth import AttemptTruth
from zslurm.aegis.simulation.world import KILL_S, REQUEUE_S, WALL, World
from zslurm.aegis.types import Decision, Fault, History, Resources
from zslurm.checkpoint_tools.quantities import counted
from zslurm.config.aegis import AegisSection
from zslurm.core.errors import Exit
from zslurm.run.events import FaultDetected, RanksEnded, RanksMoved, RecoveredInMemory, StepKilled, StopAsked
from zslurm.run.events.event import select
from zslurm.run.exclusions import active_exclusions
from zslurm.train.recovery.generation import member_name

STARTS_AGAIN_S = 2
"""Seconds until the batch script has started a supervisor again."""
DRAINS_S = 30
"""Seconds between two questions which nodes Slurm drains."""
_PAUSED_S = 3
_RESUMED = (FaultDetected, RanksEnded, StepKilled, StopAsked, RecoveredInMemory, RanksMoved)

Phase = Literal["queued", "starting", "watching", "clearing", "over"]


class _Killed(Exception):
    """The supervisor is killed."""


@dataclass
class Run:
    """One run, from its submission to its end.

    Attributes:
        world: in which it is.
        settings: the section `aegis`.
        needed: nodes that the ranks need.
        spares: nodes that the job asks for besides.
        rows: what was recorded, as in events.jsonl.
        phase: what the supervisor does.
        allocated: the nodes of the job.
        excluded: nodes that the job must not get, by Slurm's list.
        outcome: how the run ended; empty while it has not.
        why: why it ended, or waits.
    """

    world: World
    settings: AegisSection
    needed: int
    spares: int
    rows: list[dict[str, Any]] = field(default_factory=list)
    phase: Phase = "queued"
    allocated: list[str] = field(default_factory=list)
    excluded: set[str] = field(default_factory=set)
    outcome: str = ""
    why: str = "it was submitted"
    until: int = 0
    """When the present phase is over, at the earliest."""

    def __post_init__(self) -> None:
        self._brief: list[dict[str, Any]] = []
        """The rows, without lists of all nodes: to read those again and again takes long on large clusters."""
        self._history = History()
        self.state: AttemptState | None = None
        self.following = FollowState(self.settings, 2)
        self.detector = Detector(self.settings)
        self.reported: set[tuple[str, bool]] = set()
        self.next_nodes: list[str] = []
        self.alive = True
        self.seen = 0
        self.given_up: GiveUp | None = None
        self.found: FoundMemory | None = None
        self.drains_at = self.moves_read = 0
        self.stop_by: float | None = None
        """Until when the ranks may save; None while nothing asks them to stop."""
        self.moments = 0
        """Moments in which the supervisor could be killed so far: one before and one after each action."""
        self.left: set[int] = set()
        """Attempts of earlier starts of the job."""

    def record(self, kind: str, /, **fields: Any) -> None:
        """Write an event."""
        self.rows.append({"time": self.world.wall, "event": kind, "job_id": "1", **fields})

    def _may_be_killed(self) -> None:
        """Count a moment before or after an action, in which the supervisor may be killed."""
        self.moments += 1
        if self.world.kill_supervisor is None:
            return
        left, latest = self.world.kill_supervisor
        self.world.kill_supervisor = (left - 1, latest) if left > 0 else None
        if left <= 0:
            raise _Killed

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

    # --- second by second ---------------------------------------------------------------------------------------

    def second(self) -> None:
        """Do what the supervisor does in a second; nothing while it is stopped, or not there."""
        world = self.world
        if self.phase == "over" or world.is_suspended:
            return
        if self.phase == "queued":
            self._wait_in_queue()
            return
        if self._batch_node_died():
            return
        try:
            self._second()
        except _Killed:
            self.state, self.alive, self.until = None, False, world.now + STARTS_AGAIN_S

    def _second(self) -> None:
        world = self.world
        if world.kill_supervisor is not None and world.now >= world.kill_supervisor[1]:
            world.kill_supervisor = None
            raise _Killed
        if not self.alive:
            if world.now < self.until:
                return
            self._come_back()
        paused = world.now - self.seen
        self.seen = world.now
        if self.phase == "starting" and world.now >= self.until:
            if world.time_is_up:
                self.following.stop = self._stop()
                self._tell_follow(StopBetween())
            else:
                self._start()
        elif self.phase == "watching":
            self._watch(paused)
        elif self.phase == "clearing":
            self._clear()

    def _stop(self) -> StopState:
        """Return the request to save and stop; the batch script passes it on to the next supervisor."""
        if not self.world.time_is_up:
            return StopState()
        if self.stop_by is None:
            self.stop_by = self.world.now + self.settings.save_s
        return StopState(True, "SIGUSR2", "SIGUSR2", deadline=self.stop_by, comes_back=True)

    def _forward_stop(self, attempt: AttemptTruth, state: AttemptState) -> None:
        """Ask the ranks to save and stop, as soon as Slurm warns the job of its time limit."""
        if (stop := self._stop()) != state.stop:
            self.record("signal", attempt=attempt.number, signal=stop.name)
            self.tell(StopChanged(stop))
        attempt.is_asked = stop.asked

    def _wait_in_queue(self) -> None:
        """Get nodes, if there are enough: Slurm gives those that it believes to be up."""
        world = self.world
        usable = world.usable_in_partition(self.excluded)
        asked = self.needed + self.spares
        if world.now < self.until or not world.slurm_answers:
            return
        if len(usable) < asked:
            self.why = f"{counted(asked, 'node is', 'nodes are')} needed, and {len(usable)} usable"
            return
        self.allocated, self.phase, self.until = usable[:asked], "starting", world.now
        world.time_is_up, self.stop_by = False, None
        self.alive, self.seen, self.next_nodes = True, world.now, []
        self.left = set(range(1, world.attempts + 1))
        world.agents_on = set(self.allocated)
        for name in self.allocated:
            world.by_name[name].is_new = True
        self.following, self.detector = FollowState(self.settings, 2), Detector(self.settings)

    def _batch_node_died(self) -> bool:
        """Return whether the supervisor's node died; Slurm requeues the job once it knows."""
        batch = self.world.by_name[self.allocated[0]]
        if batch.died is None:
            return False
        if batch.slurm_knows(self.world.now) and self.world.slurm_answers:
            if self.world.attempt is not None and self.world.attempt.over is None:
                self.world.kill()
            self.state = None
            self.phase, self.until, self.why = "queued", self.world.now + REQUEUE_S, "its batch node died"
        return True

    def _come_back(self) -> None:
        """Continue from what is on disk, as the next supervisor does."""
        self.alive, self.seen = True, self.world.now
        self.following, self.detector = FollowState(self.settings, 2), Detector(self.settings)
        for node in self.world.nodes:  # the next agents report everything that is wrong
            node.is_new = True
        attempt = self.world.attempt
        if attempt is None or attempt.number in self.left:
            return
        decided = [row for row in self.rows if row["event"] == "decision" and row["attempt"] == attempt.number]
        if decided and (decision := Decision.of(decided[-1])) is not None:
            ended = [
                row for row in self.rows if row["event"] == "attempt_ended" and row["attempt"] == attempt.number
            ]
            outcome = AttemptOutcome.of(ended[-1])
            assert outcome is not None
            self.following.stop = self._stop()
            self._tell_follow(DecisionFound(decision, outcome, attempt.number))
            return
        self.phase = "watching"
        self._begin(attempt, adopted=True)
        recorded = tuple(
            event for event in select(self.rows, *_RESUMED) if event.row.get("attempt") == attempt.number
        )
        self.tell(Resumed(recorded, tuple(attempt.log), {}, float(self.world.now), self.world.wall))
        if self.state is not None and self.state.memory is not None and self.found is not None:
            self.tell(MemoryResumed(self.found.pending, self.found.died, float(self.world.now)))
            if self.found.outcome is not None:
                self.tell(StoreReported(self.found.outcome, float(self.world.now)))

    # --- one attempt --------------------------------------------------------------------------------------------

    def _start(self) -> None:
        """Start the ranks, on the nodes that were decided on or the first that may be used."""
        avoided = self.excluded_nodes
        nodes = self.next_nodes or [node for node in self.allocated if node not in avoided]
        if len(nodes) < self.needed and not self.next_nodes:
            nodes = self.allocated
        attempt = self.world.start(nodes[: self.needed] if not self.next_nodes else nodes)
        self.record("attempt_started", attempt=attempt.number, nodes=[n.name for n in attempt.nodes], world_size=1)
        self._begin(attempt)
        self.phase = "watching"

    def _begin(self, attempt: AttemptTruth, *, adopted: bool = False) -> None:
        rank_nodes = [rank.node.name for rank in attempt.tasks]
        found, store = None, self.world.store
        if adopted and store is not None:
            members = [member_name(node, number % 2) for number, node in enumerate(rank_nodes)]
            events = [each for each in select(self.rows, *KINDS) if each.row.get("attempt") == attempt.number]
            report = store.adopted()
            found = found_memory(report, members, events)
            rank_nodes = found.rank_nodes
        times = [2.0] * 3 if adopted and attempt.progressed else []
        self.detector.begin(attempt.number, rank_nodes, float(self.world.now), adopted=adopted, step_times=times)
        nodes = tuple(dict.fromkeys(rank_nodes))
        unused = set(self.allocated) - set(nodes) - self.excluded_nodes
        spares = [name for name in unused if not self.world.by_name[name].slurm_knows(self.world.now)]
        self.state = AttemptState(
            self.settings, attempt.number, nodes, rank_nodes, self.detector,
            history=self.history, spares=len(spares), reported=self.reported,
            own_node=self.allocated[0], moves=MovesState(self._answered_moves()),
        )  # fmt: skip
        self.drains_at, self.moves_read = 0, 0
        usable = tuple(name for name in self.allocated if name not in self.excluded_nodes)
        if found is not None and store is not None:
            trained = attempt.step if attempt.progressed else -1
            self.state.memory = found.state(2, usable, store.started, store.warm, trained)
            self.found = found
        elif store is not None:
            idle = tuple(name for name in usable if name in unused)
            self.state.memory = MemoryState.of_start(rank_nodes, 2, idle)
        if self.state.memory is not None:
            self.state.memory.checks_spares = True
        self.given_up = None

    def tell(self, event: CoreEvent) -> None:
        """Report an event to the core, and do what follows from it."""
        assert self.state is not None
        _, actions = step(self.state, event)
        if not actions:
            return
        answers = deque(self._carried_out(actions))
        while answers:
            _, actions = step(self.state, answers.popleft())
            answers.extend(self._carried_out(actions))

    def _carried_out(self, actions: list[CoreAction]) -> list[CoreEvent]:
        """Carry out actions, and return what comes of them."""
        answers: list[CoreEvent] = []
        for action in actions:
            self._may_be_killed()
            answers += self._carry_out(action)
            self._may_be_killed()
        return answers

    def _carry_out(self, action: CoreAction) -> list[CoreEvent]:
        attempt, store = self.world.attempt, self.world.store
        assert attempt is not None and self.state is not None
        match action:
            case Record():
                row = action.event.row
                self.record(row.pop("event"), **row)
            case Exclude():
                self._exclude(action)
            case GiveUp():
                self.given_up = action
            case ExamineHang():
                return [HangExamined()]
            case KillRanks():
                silent = [n for n in action.ranks if not self._answers(self.state.rank_nodes[n])]
                if not silent:
                    self.world.kill_ranks(action.ranks)
                return [RanksKilled(action.ranks, "no agent answers" if silent else "", float(self.world.now))]
            case StartWarm() if store is not None:
                store.start([self.world.by_name[n] for n in action.nodes], action.per_node, self.world.now)
            case WeighFewer():
                return [FewerWeighed(action.nodes, "aegis.min_nodes is not set")]
            case CheckSpare():
                reasons = {node: "" if self._is_fit(node) else "it was checked" for node in action.nodes}
                return [SparesChecked(reasons, action.round)]
            case Regroup() if store is not None:
                store.publish(action.generation, self.world.now)
            case HoldForMove() if store is not None:
                store.move = action.generation
            case AskAbout():
                return [NodeAskedAbout(action.node, self._witnesses(action))]
            case ReadEnd():
                return [EndRead(action.rank, None, action.gone_s, float(self.world.now))]
            case ReadLastWords():
                return [FaultsFound(tuple(self._last_word(attempt, rank) for rank in action.failure.ranks))]
        return []

    def _answers(self, node: str) -> bool:
        """Return whether the agent of a node answers."""
        truth = self.world.by_name[node]
        return truth.died is None and self.world.now >= truth.silent_until

    def _answered_moves(self) -> frozenset[tuple[str | None, str]]:
        answers = [row for row in self.rows if row["event"] in ("ranks_moved", "move_refused")]
        return frozenset((row.get("request"), row["off"]) for row in answers)

    def _tell_memory(self) -> None:
        """Report what the store server, warm processes, people and Slurm say."""
        world, now, store = self.world, float(self.world.now), self.world.store
        if store is not None:
            while store.reports:
                self.tell(StoreReported(store.reports.pop(0), now))
            while store.ends:
                member, failure = store.ends.pop(0)
                self.tell(WarmEnded(member, failure, {}, now))
        if world.slurm_answers and now >= self.drains_at and store is not None:
            self.drains_at = world.now + DRAINS_S
            self.tell(DrainsRead(world.drained(), world.wall))
        for node, request in world.moves_asked[self.moves_read :]:
            self.moves_read += 1
            self.tell(MoveRequested(node, "asked for", request, now))

    def _last_word(self, attempt: AttemptTruth, number: int) -> Fault:
        """Return what a rank recorded: the error of the program, or that it lost its peers; else that it died."""
        rank = attempt.ranks[number]
        node, when = rank.node.name, self.world.wall - (self.world.now - (rank.ended or self.world.now))
        if rank.fault == "user_error":
            line = f"ValueError: in step {self.world.bug}"
            return Fault.of_kind(
                USER_ERROR, when, "rank", line, node=node, rank=number, step=self.world.bug, fingerprint=None
            )
        if rank.fault == "peer_lost":
            return Fault.of_kind(PEER_LOST, when, "rank", "Connection closed by peer", node=node, rank=number)
        return Fault.of_kind(RANK_KILLED, when, "srun", "Killed", node=node, rank=number)

    def _watch(self, paused: int) -> None:
        world, state = self.world, self.state
        attempt = world.attempt
        assert state is not None and attempt is not None
        if paused > _PAUSED_S:
            self.tell(Paused(float(paused), float(world.now)))
        self._forward_stop(attempt, state)
        self._collect(over=attempt.over is not None)
        if attempt.over is None:
            if self.given_up is None:
                return
            root = self.given_up.root
            about = {} if root is None else {"root": root.fields()}
            self.record("step_killed", attempt=attempt.number, reason=self.given_up.reason, **about)
        self.phase, self.until = "clearing", world.now + KILL_S

    def _collect(self, *, over: bool) -> None:
        world, state = self.world, self.state
        attempt = world.attempt
        assert state is not None and attempt is not None
        for failure in attempt.log[state.ends_taken :] if self.phase == "watching" else ():
            asked = {rank: {"rank": rank, "exit_code": 75} for rank in failure.ranks if failure.exit_code == 75}
            self.tell(RanksFailed(failure, asked, float(world.now)))
        if self.phase == "watching" and attempt.over is None:
            self._tell_memory()
        for when, report in world.take_reports():
            self.tell(ReportReceived(report, float(when), WALL + when))
        if down := self._down():
            self.tell(SlurmAnswered(dict.fromkeys(down, "Slurm reports down"), down))
        self._tell_progress()
        self.tell(Tick(float(world.now), world.wall, failed_nodes=tuple(attempt.failed_nodes), over=over))

    def _witnesses(self, question: AskAbout) -> WitnessReport:
        """Return what is answered about a silent node by its slurmd and its neighbours."""
        reach = self.world.reach(self.world.by_name[question.node])
        neighbours = dict.fromkeys((name for name in question.neighbours if self._answers(name)), reach)
        return WitnessReport(float(self.world.now), reach, neighbours)

    def _down(self) -> frozenset[str]:
        """Return the nodes that Slurm calls down; none while it does not answer."""
        world = self.world
        return frozenset(n.name for n in world.nodes if world.slurm_answers and n.slurm_knows(world.now))

    def _tell_progress(self) -> None:
        state, attempt = self.state, self.world.attempt
        assert state is not None and attempt is not None
        if state.needs_progress(float(self.world.now)):
            moved = self.world.wall - (self.world.now - attempt.moved) if attempt.progressed else None
            self.tell(ProgressRead(self.world.committed, moved))

    def _clear(self) -> None:
        """End what is left, wait for every node that misses heartbeats, and decide."""
        world, state = self.world, self.state
        attempt = world.attempt
        assert state is not None and attempt is not None
        if attempt.over is None and world.now >= self.until:
            world.kill()
        self._collect(over=True)
        if attempt.over is None:
            return
        if state.cleared_at is None:
            self.tell(Cleared(float(world.now)))
        if state.awaits_nodes(float(world.now)):
            return
        self._follow(attempt)

    # --- what follows -------------------------------------------------------------------------------------------

    def _follow(self, attempt: AttemptTruth) -> None:
        state = self.state
        assert state is not None
        completed = attempt.step >= self.world.total and all(rank.code == 0 for rank in attempt.ranks)
        outcome = AttemptOutcome("completed" if completed else "failed", 0 if completed else 1)
        if all(rank.code == Exit.INTERRUPTED for rank in attempt.ranks):
            outcome = AttemptOutcome("interrupted", Exit.INTERRUPTED)
        if completed:
            self.record("attempt_ended", attempt=attempt.number, **outcome.fields())
            self._end("completed", "the run is complete")
            return
        self.following.stop = self._stop()
        self._tell_follow(AttemptOver(state, outcome))

    def _tell_follow(self, event: FollowEvent) -> None:
        """Report an event to the core, and do what follows from it."""
        events = deque([event])
        while events:
            for action in follow(self.following, events.popleft()):
                self._may_be_killed()
                events.extend(self._carry_out_following(action))
                self._may_be_killed()

    def _carry_out_following(self, action: FollowAction) -> list[FollowEvent]:
        now = self.world.now
        match action:
            case Record():
                row = action.event.row
                self.record(row.pop("event"), **row)
            case Exclude():
                self._exclude(action)
            case ReadRun():
                return [self._read_run()]
            case FindNodes():
                return [NodesFound(self._find_nodes(action))]
            case CountNodes():
                return [NodesCounted(self._elsewhere(action.excluded))]
            case CheckSpares():
                unfit = {node: "it was checked" for node in action.nodes if not self._is_fit(node)}
                return [SparesExamined(unfit if self.detector.nodes.any_responding(float(now)) else {})]
            case Requeue():
                self._requeue(action)
                return [RequeueTried()]
            case StartAgain():
                self.next_nodes = list(action.nodes)
                self.phase, self.until = "starting", now + 1 + int(action.wait_s)
            case EndRun() if self.phase != "queued":
                outcome = action.outcome.outcome
                self._end("stopped" if outcome == "failed" else outcome, str(action.outcome.cause))
        return []

    def _read_run(self) -> RunRead:
        world, attempt = self.world, self.world.attempt
        moved = None
        if attempt is not None and attempt.progressed:
            moved = world.wall - (world.now - attempt.moved)
        return RunRead(self.history, ProgressRead(world.committed, moved), world.attempts, world.wall)

    def _find_nodes(self, action: FindNodes) -> Resources:
        dead = self.state.dead_nodes if self.state is not None else set()
        return Resources(
            tuple(node for node in self.allocated if node not in dead and node not in action.excluded),
            action.in_use,
            self.needed,
            outlives_nodes=True,
            elsewhere=self._elsewhere(action.excluded) if action.look_elsewhere else None,
            asked=len(self.allocated),
        )

    def _elsewhere(self, excluded: Collection[str]) -> int | None:
        """Return how many nodes the job could run on; None if Slurm does not answer."""
        dead = self.state.dead_nodes if self.state is not None else set()
        if not self.world.slurm_answers:
            return None
        return len(set(self.world.usable_in_partition(set(excluded))) - dead)

    def _is_fit(self, name: str) -> bool:
        node = self.world.by_name[name]
        if self.world.now < node.silent_until:
            self.world.guilty.setdefault(name, "its agent did not answer when it was checked")
        return node.died is None and self.world.now >= node.silent_until and not node.ecc

    def _exclude(self, action: Exclude) -> None:
        expires = self.world.wall + self.settings.exclude_for_s
        about = {"nodes": list(action.nodes), "reason": action.reason, "attempt": action.attempt}
        if not any(row["event"] == "nodes_excluded" and about.items() <= row.items() for row in self.rows):
            self.record("nodes_excluded", **about, expires=expires)

    def _requeue(self, action: Requeue) -> None:
        self.excluded = set(action.excluded)
        self.why = action.decision.reason
        self.phase, self.until = "queued", self.world.now + REQUEUE_S
        if action.decision.n_nodes is not None:
            self.spares = max(0, action.decision.n_nodes - self.needed)
        self.record("requeued", excluded=sorted(self.excluded), reason=action.decision.reason)

    def _end(self, outcome: str, why: str) -> None:
        self.record("run_ended", outcome=outcome)
        self.phase, self.outcome, self.why = "over", outcome, why
