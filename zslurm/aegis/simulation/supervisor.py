"""A supervisor in the simulated world: it turns what happens into events for the core, and carries actions out.

It decides nothing: `step` and `follow` do. The next supervisor continues from the rows of the events (run.py).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Sequence
from typing import Any, Literal

from zslurm.aegis.core.adopted_memory import KINDS, FoundMemory, found_memory
from zslurm.aegis.core.attempt import AttemptState, MemoryState, MovesState
from zslurm.aegis.core.detection.detector import Detector
from zslurm.aegis.core.detection.witnesses import WitnessReport
from zslurm.aegis.core.ending import asks_who_stopped, gives_up_answer
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
    LeaveToSlurm,
    NodesCounted,
    NodesFound,
    NodesOffered,
    ReadRun,
    Requeue,
    RequeueTried,
    RunRead,
    SparesExamined,
    StartAgain,
    StartHere,
    StopBetween,
    follow,
)
from zslurm.aegis.core.messages import (
    NO_ANSWER,
    AskAbout,
    AskForHelper,
    CheckSpare,
    Cleared,
    CoreAction,
    CoreEvent,
    DismissHelper,
    DrainsRead,
    EndRead,
    ExamineHang,
    Exclude,
    FaultsFound,
    FewerWeighed,
    GiveUp,
    HangExamined,
    HelperAsked,
    HelperEnded,
    HelperStarted,
    HoldForMove,
    KillRanks,
    LookForPreemption,
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
from zslurm.aegis.core.policy.outcome import AttemptOutcome
from zslurm.aegis.core.policy.shrinking import Weighed, expected_wait_s, weigh, why_not_fewer
from zslurm.aegis.core.starting import decided_requeue
from zslurm.aegis.core.step import step
from zslurm.aegis.fault_kinds import NUMBERS_WRONG, PEER_LOST, RANK_KILLED, USER_ERROR
from zslurm.aegis.simulation.run_record import RunRecord
from zslurm.aegis.simulation.truth import AttemptTruth
from zslurm.aegis.simulation.world import KILL_S, STEP_S
from zslurm.aegis.types import Decision, Fault, Resources, WorkLeft
from zslurm.core.errors import Exit
from zslurm.run.events import (
    AttemptEnded,
    AttemptStarted,
    Decided,
    FaultDetected,
    RanksEnded,
    RanksExpelled,
    RanksJoined,
    RanksMoved,
    RecoveredInMemory,
    Requeued,
    StepKilled,
    StopAsked,
)
from zslurm.run.events.event import select
from zslurm.train.recovery.generation import member_name

DRAINS_S = 30
"""Seconds between two questions which nodes Slurm drains."""
_SEQUENCES = 64
"""Sequences of a rank in a step, if no node is missing."""
HELPER_AGAIN_S = 60
"""Seconds after which a helper job is asked for again that was refused."""
_PAUSED_S = 3
_ASK_AGAIN_S = 5
"""Seconds between two questions whether Slurm preempts the job."""
_RESUMED = (
    FaultDetected, RanksEnded, StepKilled, StopAsked, RecoveredInMemory, RanksExpelled, RanksJoined, RanksMoved,
)  # fmt: skip

Phase = Literal["starting", "watching", "clearing", "requeuing", "leaving"]


class Replaced(Exception):
    """Another supervisor has the run: this one ends without any action."""


class SimulatedSupervisor:
    """One process that supervises the run.

    Attributes:
        run: the run.
        host: the node on which it is.
        phase: what it does.
        until: when the present phase is over, at the earliest.
        attempt: the one that it watches, or watched last.
        state: of that attempt, by the core.
        seen: the last second in which it was not stopped.
    """

    def __init__(self, run: RunRecord) -> None:
        self.run, self.world, self.settings = run, run.world, run.settings
        self.host, self.until = run.allocated[0], run.world.now
        self.phase: Phase = "starting"
        self.attempt: AttemptTruth | None = None
        self.state: AttemptState | None = None
        self.seen = run.world.now
        self.drains_at = self.moves_read = 0
        self._following, self._detector = FollowState(run.settings, 2), Detector(run.settings)
        self._reported: set[tuple[str, bool]] = set()
        self._next_nodes: list[str] = []
        self._given_up: GiveUp | None = None
        self._found: FoundMemory | None = None
        self._helpers_told: dict[str, str] = {}
        """What the core was last told of each helper job."""
        self._requeues: Requeue | None = None
        self._stop_by: float | None = None
        """Until when the ranks may save; None while nothing asks them to stop."""
        self._is_preempted = False
        """Slurm has said that it preempts the job."""
        self._asks_at: int | None = None
        """When Slurm is asked whether it preempts the job; None: not."""
        self._asks_who_since: int | None = None
        """Since when Slurm is asked who has stopped the ranks; None: it is not asked."""

    @property
    def wall(self) -> float:
        """UNIX seconds by the clock of its host."""
        return self.world.wall + self.world.by_name[self.host].clock_off

    @property
    def has_run(self) -> bool:
        """Whether no other supervisor has taken the run over (the lease in supervisor.json)."""
        return self.run.supervisor is None or self.run.supervisor is self

    def record(self, kind: str, /, **fields: Any) -> None:
        """Write an event, unless another supervisor has the run."""
        if not self.has_run:
            raise Replaced
        self._act(f"record {kind}")
        self.run.record(kind, self.wall, **fields)

    @property
    def _slurm_answers(self) -> bool:
        return self.world.slurm_answers(self.host)

    def second(self) -> None:
        """Do what the supervisor does in a second."""
        world = self.world
        paused = world.now - self.seen
        self.seen = world.now
        if self.phase == "starting" and world.now >= self.until:
            self._look_for_preemption()
            self._following.stop = self._stop()
            if self._following.stop.asked:
                events = list(select(self.run.rows, AttemptStarted, AttemptEnded, Requeued, Decided))
                self._tell_follow(StopBetween(decided_requeue(events, "1")))
            elif not self._slurm_answers:
                return  # no step can be started
            elif self._next_nodes:
                self._start(self._next_nodes)
            else:
                self._tell_follow(self._offered())
        elif self.phase == "watching":
            self._watch(paused)
        elif self.phase == "clearing":
            self._clear()
        elif self.phase == "requeuing":
            self._try_requeue()

    def _stop(self) -> StopState:
        """Return the request to save and stop; the batch script passes a signal on to the next supervisor."""
        by_signal = self.world.time_is_up
        if not (by_signal or self._is_preempted):
            return StopState()
        if self._stop_by is None:
            self._stop_by = self.world.now + self.settings.save_s
        name = "SIGUSR2" if by_signal else None
        preempted: Literal["requeue"] | None = "requeue" if self._is_preempted else None
        return StopState(
            True, name, name or "preempted", preempted=preempted, deadline=self._stop_by, comes_back=True
        )

    def _forward_stop(self, attempt: AttemptTruth, state: AttemptState) -> None:
        """Ask the ranks to save and stop, as soon as Slurm warns the job of its time limit, or preempts it."""
        if (stop := self._stop()) != state.stop:
            if stop.name is not None and state.stop.name is None:
                self.record("signal", attempt=attempt.number, signal=stop.name)
                self._asks_at = self.world.now
            self.tell(StopChanged(stop))
        attempt.is_asked = attempt.is_asked or stop.asked

    def _look_for_preemption(self) -> None:
        """Ask Slurm whether it preempts the job, until it answers."""
        now = self.world.now
        if self._asks_at is None or now < self._asks_at:
            return
        if not self._slurm_answers:
            self._asks_at = now + _ASK_AGAIN_S
            return
        self._asks_at = None
        if self.world.preempted_until is not None and not self._is_preempted:
            self._is_preempted = True
            self.record("preempted", mode="requeue")

    def come_back(self) -> None:
        """Continue from what is on disk, as the next supervisor does."""
        for node in self.world.nodes:  # the next agents report everything that is wrong
            node.is_new = True
        attempt, rows = self.world.attempt, self.run.rows
        if attempt is None or attempt.number in self.run.left:
            return
        self.attempt = attempt
        decided = [row for row in rows if row["event"] == "decision" and row["attempt"] == attempt.number]
        if decided and (decision := Decision.of(decided[-1])) is not None:
            ended = [row for row in rows if row["event"] == "attempt_ended" and row["attempt"] == attempt.number]
            outcome = AttemptOutcome.of(ended[-1])
            assert outcome is not None
            self._following.stop = self._stop()
            self._tell_follow(DecisionFound(decision, outcome, attempt.number))
            return
        self.phase = "watching"
        self._begin(attempt, adopted=True)
        recorded = tuple(event for event in select(rows, *_RESUMED) if event.row.get("attempt") == attempt.number)
        self.tell(Resumed(recorded, tuple(attempt.log), {}, float(self.world.now), self.wall))
        if self.state is not None and self.state.memory is not None and self._found is not None:
            self.tell(MemoryResumed(self._found.pending, self._found.died, float(self.world.now)))
            if self._found.outcome is not None:
                self.tell(StoreReported(self._found.outcome, float(self.world.now), self.wall))

    # --- one attempt --------------------------------------------------------------------------------------------

    @property
    def _needed(self) -> int:
        """Nodes that the ranks are meant to have: fewer than the run asks for if its job was shrunk."""
        return min(self.run.needed, len(self.run.allocated))

    def _candidates(self) -> list[str]:
        """Return the nodes on which ranks may start: without excluded ones, unless too few would be left."""
        living = [node for node in self.run.allocated if node not in self.run.dead]
        usable = [node for node in living if node not in self.run.excluded_nodes]
        return usable if len(usable) >= min(self._needed, self.settings.fewest_nodes or self._needed) else living

    def _offered(self) -> NodesOffered:
        """Return the nodes that Slurm has chosen, on which ranks are about to start."""
        requeues = 0
        for row in self.run.rows:
            requeues = {"requeued": requeues + 1, "attempt_started": 0}.get(row["event"], requeues)
        excluded = frozenset(self.run.excluded_nodes)
        return NodesOffered(tuple(self._candidates()), excluded, True, len(self.run.allocated), requeues)

    def _start(self, nodes: list[str]) -> None:
        """Start the ranks."""
        self._act("start")
        self.attempt = attempt = self.world.start(nodes)
        self.record("attempt_started", attempt=attempt.number, nodes=[n.name for n in attempt.nodes], world_size=1)
        self._begin(attempt)
        self.phase = "watching"

    def _begin(self, attempt: AttemptTruth, *, adopted: bool = False) -> None:
        self._asks_who_since = None
        rank_nodes = [rank.node.name for rank in attempt.tasks]
        found, store = None, self.world.store
        if adopted and store is not None:
            members = [member_name(node, number % 2) for number, node in enumerate(rank_nodes)]
            events = [each for each in select(self.run.rows, *KINDS) if each.row.get("attempt") == attempt.number]
            report = store.adopted()
            found = found_memory(report, members, events)
            rank_nodes = found.rank_nodes
        times = [2.0] * 3 if adopted and attempt.progressed else []
        self._detector.begin(attempt.number, rank_nodes, float(self.world.now), adopted=adopted, step_times=times)
        nodes = tuple(dict.fromkeys(rank_nodes))
        unusable = self.run.excluded_nodes | self.run.dead
        unused = set(self.run.allocated) - set(nodes) - unusable
        spares = [name for name in unused if not self.world.by_name[name].slurm_knows(self.world.now)]
        self.state = AttemptState(
            self.settings, attempt.number, nodes, rank_nodes, self._detector,
            history=self.run.history, spares=len(spares), reported=self._reported,
            own_node=self.host, moves=MovesState(self._answered_moves()),
        )  # fmt: skip
        self.drains_at, self.moves_read = 0, 0
        usable = tuple(name for name in self.run.allocated if name not in unusable)
        if found is not None and store is not None:
            trained = attempt.step if attempt.progressed else -1
            self.state.memory = found.state(2, usable, store.started, store.warm, trained)
            self._found = found
        elif store is not None:
            idle = tuple(name for name in usable if name in unused)
            self.state.memory = MemoryState.of_start(rank_nodes, 2, idle)
        if self.state.memory is not None:
            self.state.memory.checks_spares = True
        weighs = self.settings.heal == "auto" and self.run.helper_wait_s is not None
        if self.state.memory is not None and (weighs or self.settings.heal == "helper"):
            self.state.memory.wanted, self.state.memory.weighs_helper = self.run.needed, weighs
        self._helpers_told = dict[str, str]()
        self._given_up = None

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
            self.run.may_be_killed()
            answers += self._carry_out(action)
            self.run.may_be_killed()
        return answers

    def _carry_out(self, action: CoreAction) -> list[CoreEvent]:
        attempt, store = self.attempt, self.world.store
        assert attempt is not None and self.state is not None
        match action:
            case Record():
                row = action.event.row
                self.record(row.pop("event"), **row)
            case Exclude():
                self._exclude(action)
            case GiveUp():
                self._given_up = action
            case ExamineHang():
                return [HangExamined()]
            case KillRanks():
                silent = [n for n in action.ranks if not self._answers(self.state.rank_nodes[n])]
                if not silent:
                    self._act("kill ranks")
                    self.world.kill_ranks(action.ranks)
                return [RanksKilled(action.ranks, "no agent answers" if silent else "", float(self.world.now))]
            case LookForPreemption():
                self._asks_at = self.world.now
            case StartWarm() if store is not None:
                store.start([self.world.by_name[n] for n in action.nodes], action.per_node, self.world.now)
            case WeighFewer():
                weighed = self._weighed(action.nodes)
                fewer = why_not_fewer(action.nodes, self.settings, lambda: None, lambda: weighed)
                return [FewerWeighed(action.nodes, fewer.reason, fewer.weighed)]
            case CheckSpare():
                return [SparesChecked(dict.fromkeys(action.nodes, "") | self._unfit(action.nodes), action.round)]
            case Regroup() if store is not None:
                self._act("regroup")
                store.publish(action.generation, self.world.now)
            case HoldForMove() if store is not None:
                store.move = action.generation
            case AskForHelper():
                return [self._ask_for_helper(action.nodes)]
            case DismissHelper():
                self._act("dismiss a helper")
                for helper in self.run.helpers:
                    if helper.name == action.helper and not helper.over:
                        self.run.end_helper(helper)
            case AskAbout():
                return [NodeAskedAbout(action.node, self._witnesses(action))]
            case ReadEnd():
                return [EndRead(action.rank, None, action.gone_s, float(self.world.now))]
            case ReadLastWords():
                return [FaultsFound(tuple(self._last_word(attempt, rank) for rank in action.failure.ranks))]
        return []

    def _weighed(self, nodes: int) -> Weighed | None:
        """Return fewer nodes against the other measures, with a batch that ranks divide evenly."""
        run, world = self.run, self.world
        if run.helper_wait_s is None:
            return None
        ranks = world.ranks_per_node
        done = world.committed if world.attempt is None else world.attempt.step
        work = WorkLeft(_SEQUENCES * ranks * run.needed, 1, ranks, training_s=float((world.total - done) * STEP_S))
        wait_s = expected_wait_s(run.history, self.settings)
        return weigh(work, nodes, run.needed, nodes, wait_s, run.helper_wait_s)

    def _ask_for_helper(self, count: int) -> HelperAsked:
        now = self.world.now
        if not self._slurm_answers or now < self.world.refuses_helper_until:
            self.record("helper_refused", reason="Job violates accounting/QOS policy")
            return HelperAsked(waits=False, again_at=float(now + HELPER_AGAIN_S))
        self._act("submit a helper")
        self.run.submit_helper(count)
        return HelperAsked(waits=True)

    def _tell_helpers(self) -> None:
        """Report which helper jobs have started, and which are over."""
        for helper in [helper for helper in self.run.helpers if helper.start == self.run.starts]:
            state = "over" if helper.over else "started" if helper.nodes else "queued"
            if not self._slurm_answers or self._helpers_told.get(helper.name) == state:
                continue
            self._helpers_told[helper.name] = state
            if state == "over":
                self.tell(HelperEnded(helper.name, helper.nodes, float(self.world.now)))
            elif state == "started":
                self.tell(HelperStarted(helper.name, helper.nodes))
            else:
                self.tell(HelperAsked(waits=True))

    def _answers(self, node: str) -> bool:
        """Return whether the agent of a node answers."""
        truth = self.world.by_name[node]
        away = truth.died is not None or self.world.now < truth.silent_until
        return not away and self.world.are_connected(node, self.host)

    def _answered_moves(self) -> frozenset[tuple[str | None, str]]:
        answers = [row for row in self.run.rows if row["event"] in ("ranks_moved", "move_refused")]
        return frozenset((row.get("request"), row["off"]) for row in answers)

    def _tell_memory(self) -> None:
        """Report what the store server, warm processes, people and Slurm say."""
        world, now, store = self.world, float(self.world.now), self.world.store
        if store is not None:
            while store.reports:
                self.tell(StoreReported(store.reports.pop(0), now, self.wall))
            while store.ends:
                member, failure = store.ends.pop(0)
                self.tell(WarmEnded(member, failure, {}, now))
        if self._slurm_answers and now >= self.drains_at and store is not None:
            self.drains_at = world.now + DRAINS_S
            self.tell(DrainsRead(world.drained(), self.wall))
        for node, request in world.moves_asked[self.moves_read :]:
            self.moves_read += 1
            self.tell(MoveRequested(node, "asked for", request, now))

    def _last_word(self, attempt: AttemptTruth, number: int) -> Fault:
        """Return what a rank recorded: the error of the program, or that it lost its peers; else that it died."""
        rank = attempt.ranks[number]
        node, when = rank.node.name, self.wall - (self.world.now - (rank.ended or self.world.now))
        if rank.fault == "user_error":
            line = f"ValueError: in step {self.world.bug}"
            return Fault.of_kind(
                USER_ERROR, when, "rank", line, node=node, rank=number, step=self.world.bug, fingerprint=None
            )
        if rank.fault == "numbers_wrong":
            wrong = next(other for other, truth in enumerate(attempt.ranks) if truth.node.computes_wrong)
            line = f"WrongProduct: a microbatch has another result on rank {wrong} than on two others"
            node = attempt.ranks[wrong].node.name
            return Fault.of_kind(NUMBERS_WRONG, when, "rank", line, node=node, rank=wrong, step=attempt.step)
        if rank.fault == "peer_lost":
            return Fault.of_kind(PEER_LOST, when, "rank", "Connection closed by peer", node=node, rank=number)
        return Fault.of_kind(RANK_KILLED, when, "srun", "Killed", node=node, rank=number)

    def _watch(self, paused: int) -> None:
        world, state = self.world, self.state
        attempt = self.attempt
        assert state is not None and attempt is not None
        if paused > _PAUSED_S:
            self.tell(Paused(float(paused), float(world.now)))
        self._look_for_preemption()
        self._forward_stop(attempt, state)
        self._collect(over=attempt.over is not None)
        if attempt.over is None:
            if self._given_up is None:
                return
            root = self._given_up.root
            about = {} if root is None else {"root": root.fields()}
            self.record("step_killed", attempt=attempt.number, reason=self._given_up.reason, **about)
        self.phase, self.until = "clearing", world.now + KILL_S

    def _collect(self, *, over: bool) -> None:
        world, state = self.world, self.state
        attempt = self.attempt
        assert state is not None and attempt is not None
        for failure in attempt.log[state.ends_taken :] if self.phase == "watching" else ():
            asked = {rank: {"rank": rank, "exit_code": 75} for rank in failure.ranks if failure.exit_code == 75}
            self.tell(RanksFailed(failure, asked, float(world.now)))
        if self.phase == "watching" and attempt.over is None:
            self._tell_memory()
            self._tell_helpers()
        booted = self.wall - world.now
        for when, report in world.take_reports(self.host, is_former=self.run.former is self):
            self.tell(ReportReceived(report, float(when), booted + when))
        if down := self._down():
            self.tell(SlurmAnswered(dict.fromkeys(down, "Slurm reports down"), down))
        self._tell_progress()
        self.tell(Tick(float(world.now), self.wall, failed_nodes=tuple(attempt.failed_nodes), over=over))

    def _witnesses(self, question: AskAbout) -> WitnessReport:
        """Return what is answered about a silent node by its slurmd and its neighbours."""
        reach = self.world.reach(self.world.by_name[question.node])
        neighbours = dict.fromkeys((name for name in question.neighbours if self._answers(name)), reach)
        return WitnessReport(float(self.world.now), reach, neighbours)

    def _down(self) -> frozenset[str]:
        """Return the silent nodes that Slurm calls down; none while it does not answer."""
        if not self._slurm_answers:
            return frozenset()
        silent = self._detector.nodes.silent(self.settings.heartbeat_timeout_s / 2, float(self.world.now))
        return frozenset(name for name in silent if self.world.is_called_down(self.world.by_name[name]))

    def _tell_progress(self) -> None:
        state, attempt = self.state, self.attempt
        assert state is not None and attempt is not None
        if state.needs_progress(float(self.world.now)):
            moved = self.wall - (self.world.now - attempt.moved) if attempt.progressed else None
            self.tell(ProgressRead(self.world.committed, moved))

    def _clear(self) -> None:
        """End what is left, wait for every node that misses heartbeats, and decide."""
        world, state = self.world, self.state
        attempt = self.attempt
        assert state is not None and attempt is not None
        if attempt.over is None and world.now >= self.until:
            self._act("kill the step")
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
        stop = self._stop()
        if asks_who_stopped(outcome, stop) and not stop.asked and self._asks_who_stopped_them(attempt.number):
            return
        self._following.stop = self._stop()
        self.run.dead |= state.dead_nodes
        self._tell_follow(AttemptOver(state, outcome))

    def _asks_who_stopped_them(self, attempt: int) -> bool:
        """Ask Slurm who has stopped the ranks; return whether its answer is waited for."""
        if self._asks_who_since is None:
            self._asks_at = self._asks_who_since = self.world.now
        self._look_for_preemption()
        if self._asks_at is not None and (why := gives_up_answer(self.world.now - self._asks_who_since)):
            self.record("wait_given_up", attempt=attempt, reason=why)
            self._asks_at = None
        return self._asks_at is not None

    def _tell_follow(self, event: FollowEvent) -> None:
        """Report an event to the core, and do what follows from it."""
        events = deque([event])
        while events:
            for action in follow(self._following, events.popleft()):
                self.run.may_be_killed()
                events.extend(self._carry_out_following(action))
                self.run.may_be_killed()

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
                return [SparesExamined(self._unfit(action.nodes))]
            case LookForPreemption():
                self._asks_at = now
                self._look_for_preemption()
                self._following.stop = self._stop()
            case Requeue():
                self._requeues, self.phase = action, "requeuing"
            case LeaveToSlurm():
                self.phase = "leaving"
            case StartHere():
                self._start(self._candidates()[: self._needed])
            case StartAgain():
                self._next_nodes = list(action.nodes)
                self.phase, self.until = "starting", now + 1 + int(action.wait_s)
            case EndRun() if self.run.supervisor is self and self.phase != "leaving":
                outcome = action.outcome.outcome
                self._end("stopped" if outcome == "failed" else outcome, str(action.outcome.cause))
        return []

    def _read_run(self) -> RunRead:
        world, attempt = self.world, self.attempt
        moved = None
        if attempt is not None and attempt.progressed:
            moved = self.wall - (world.now - attempt.moved)
        return RunRead(self.run.history, ProgressRead(world.committed, moved), world.attempts, self.wall)

    def _find_nodes(self, action: FindNodes) -> Resources:
        dead = self.run.dead
        return Resources(
            tuple(node for node in self.run.allocated if node not in dead and node not in action.excluded),
            action.in_use,
            self._needed,
            outlives_nodes=True,
            elsewhere=self._elsewhere(action.excluded) if action.look_elsewhere else None,
            asked=len(self.run.allocated),
            work=None if action.weigh_from is None else WorkLeft(4 * self.run.needed, 1, 2),
            helper_wait_s=self.run.helper_wait_s,
        )

    def _elsewhere(self, excluded: Collection[str]) -> int | None:
        """Return how many nodes the job could run on; None if Slurm does not answer."""
        dead = self.run.dead
        if not self._slurm_answers:
            return None
        return len(set(self.world.usable_in_partition(set(excluded))) - dead)

    def _unfit(self, spares: Sequence[str]) -> dict[str, str]:
        """Return the spares that must not be used; none while nothing is known, as `unfit_spares` does."""
        others = [name for name in self.world.agents_on if name != self.host]
        answering = list(filter(self._answers, others))
        if not (answering or self._answers(self.host)) or (len(others) > 1 and not answering):
            return {}
        for name in set(spares).difference(answering):
            self.world.guilty.setdefault(name, "its agent did not answer when it was checked")
        broken = {name: "its GPU loses data" for name in spares if self.world.by_name[name].ecc}
        return broken | dict.fromkeys((name for name in spares if name not in answering), NO_ANSWER)

    def _exclude(self, action: Exclude) -> None:
        expires = self.wall + self.settings.exclude_for_s
        about = {"nodes": list(action.nodes), "reason": action.reason, "attempt": action.attempt}
        if not any(row["event"] == "nodes_excluded" and about.items() <= row.items() for row in self.run.rows):
            self.record("nodes_excluded", **about, expires=expires)

    def _try_requeue(self) -> None:
        """Put the job back into the queue, as soon as Slurm answers; it may refuse that, or its list of nodes."""
        action, world = self._requeues, self.world
        assert action is not None
        if not self._slurm_answers:
            return
        if world.now < world.refuses_requeue_until:
            self._tell_follow(RequeueTried("Requested operation not supported"))
            return
        self._act("requeue")
        self.run.end_helpers()
        why, excluded = action.decision.reason, set(action.excluded)
        self.record("requeued", excluded=sorted(excluded), reason=why)
        takes = world.now >= world.refuses_exclusion_until
        if not takes:
            self.record("exclusion_failed", nodes=sorted(excluded), reason="Requested operation not supported")
        self.run.requeue(excluded if takes else None, action.decision.n_nodes if takes else None, why)

    def _act(self, what: str) -> None:
        """Note an action on the job; one of a supervisor that no longer has the run is foreign."""
        if self.run.supervisor not in (None, self):
            self.run.foreign.append(f"{what}, by the supervisor on {self.host}")

    def _end(self, outcome: str, why: str) -> None:
        self.run.end_helpers()
        self.record("run_ended", outcome=outcome)
        self.run.end(outcome, why)
