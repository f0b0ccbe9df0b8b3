"""What follows the end of an attempt: a decision, and what is done about it.

    AttemptOver   -> ReadRun -> FindNodes -> the policy -> TestGpu or CheckSpares, and again from ReadRun
                  -> the decision is recorded -> StartAgain, EndRun, or Requeue -> EndRun
    DecisionFound -> an earlier supervisor has recorded the decision: it is carried out
    StopBetween   -> the run is asked to stop while no ranks run
    NodesOffered  -> Slurm has started the job on excluded nodes: Requeue, or StartHere

The policy decides what a fault means and what to do about it (policy/policy.py).
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from zslurm.aegis.core.attempt import AttemptState
from zslurm.aegis.core.messages import Exclude, LookForPreemption, ProgressRead, Record, StopState
from zslurm.aegis.core.policy.outcome import AttemptOutcome, Cause
from zslurm.aegis.core.policy.policy import SLURM_REQUEUES, decide
from zslurm.aegis.core.step import note
from zslurm.aegis.fault_kinds import CONFIG_ERROR, GPU_TEST_FAILED
from zslurm.aegis.types import AttemptSummary, Decision, Fault, History, Resources
from zslurm.config.aegis import AegisSection
from zslurm.core.errors import Exit
from zslurm.run.events import AttemptEnded, Decided, ExclusionFailed, GpuTested, RequeueFailed, StopAsked
from zslurm.run.events.event import only_known
from zslurm.run.exclusions import active_exclusions
from zslurm.run.state.state_events import IN_PLACE
from zslurm.slurm.hostlist import compress

_MOST_REQUEUES = 3
"""Requeues in a row without a start of ranks, to leave excluded nodes; then the ranks start on them."""


@dataclass
class FollowState:
    """What is known in one start of the job of what follows its attempts.

    Attributes:
        settings: the section `aegis` of the run.
        ranks_per_node: of the run.
        required: nodes that the run insists on (`slurm.nodelist`): the job is never told to avoid them.
        unwanted: nodes that the run's user excludes (`slurm.exclude`): they stay on the list of the job.
        attempt: the attempt that ended; None between attempts.
        outcome: how it ended; None if no attempt of this start of the job has ended yet.
        overdue: its ranks did not save and stop in time when asked to.
        stop: the request to save and stop.
        failed: the failed attempt from which the run recovers; None if the one before ended in order.
        tested: GPUs that were tested after this attempt.
        run: what was last read of the run.
        considered: a decision whose spares are checked, or whose GPU is tested, and what it was made from.
        requeues: the decision for which the job is being requeued.
        offered: nodes on which ranks are about to start though some of them are excluded.
    """

    settings: AegisSection
    ranks_per_node: int
    required: frozenset[str] = frozenset()
    unwanted: frozenset[str] = frozenset()
    attempt: AttemptState | None = None
    outcome: AttemptOutcome | None = None
    overdue: bool = False
    stop: StopState = field(default_factory=StopState)
    failed: AttemptOutcome | None = None
    tested: set[tuple[str, str]] = field(default_factory=set)
    run: RunRead | None = None
    considered: tuple[Decision, Resources] | None = None
    requeues: Decision | None = None
    offered: NodesOffered | None = None

    @property
    def acts(self) -> bool:
        """Whether decisions are carried out."""
        return self.settings.mode == "act"


# --- events -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class AttemptOver:
    """An attempt has ended without completing the run.

    Attributes:
        attempt: its state.
        outcome: how it ended.
        overdue: its ranks did not save and stop in time when asked to.
    """

    attempt: AttemptState
    outcome: AttemptOutcome
    overdue: bool = False


@dataclass(frozen=True)
class DecisionFound:
    """An earlier supervisor has decided what follows an attempt, and has perhaps not done it.

    Attributes:
        decision: what it decided.
        outcome: how the attempt ended.
        attempt: its number.
    """

    decision: Decision
    outcome: AttemptOutcome
    attempt: int


@dataclass(frozen=True)
class StopBetween:
    """The run is asked to stop while no ranks run; an earlier supervisor may have `decided` what follows."""

    decided: Decision | None = None


@dataclass(frozen=True)
class NodesOffered:
    """Ranks are about to start on nodes that Slurm has chosen.

    Attributes:
        nodes: on which.
        excluded: nodes that the run must not use now.
        can_leave: the job can be requeued, and may use every node of its partition.
        n_nodes: nodes of the job.
        requeues: how often the job was requeued since ranks last started.
    """

    nodes: tuple[str, ...]
    excluded: frozenset[str]
    can_leave: bool
    n_nodes: int
    requeues: int


@dataclass(frozen=True)
class NodesCounted:
    """So many nodes can the job run on without excluded ones, now or later; None if that is not known."""

    others: int | None


@dataclass(frozen=True)
class RunRead:
    """The run as of now; see `ReadRun`.

    Attributes:
        history: what it went through.
        progress: how far it is.
        number: of its newest attempt; 0 if it has none.
        wall: UNIX seconds.
        is_ended: an earlier supervisor has recorded the end of that attempt, and no decision.
    """

    history: History
    progress: ProgressRead
    number: int
    wall: float
    is_ended: bool = False


@dataclass(frozen=True)
class NodesFound:
    """What there is to continue with; see `FindNodes`."""

    resources: Resources


@dataclass(frozen=True)
class GpuTestEnded:
    """A GPU was tested; the fault is noted as of `wall` if it failed. See `TestGpu`."""

    tested: GpuTested
    wall: float


@dataclass(frozen=True)
class SparesExamined:
    """Spares were checked; `unfit` has those that must not be used, with the reason. See `CheckSpares`."""

    unfit: dict[str, str]


@dataclass(frozen=True)
class RequeueTried:
    """The job was requeued, or `problem` is why it could not be."""

    problem: str = ""


FollowEvent = (
    AttemptOver
    | DecisionFound
    | StopBetween
    | NodesOffered
    | NodesCounted
    | RunRead
    | NodesFound
    | GpuTestEnded
    | SparesExamined
    | RequeueTried
)


# --- actions ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class ReadRun:
    """Read the run's events and how far it is; answered by `RunRead`."""


@dataclass(frozen=True)
class FindNodes:
    """Find out what there is to continue with; answered by `NodesFound`.

    Attributes:
        excluded: nodes that must not be used.
        in_use: nodes of the attempt that ended.
        look_elsewhere: count the usable nodes outside of the job as well.
        weigh_from: weigh what is left to train after this step, if the run may shrink; None: it may not.
    """

    excluded: frozenset[str]
    in_use: tuple[str, ...]
    look_elsewhere: bool
    weigh_from: int | None


@dataclass(frozen=True)
class CountNodes:
    """Count the nodes that the job can run on without excluded ones; answered by `NodesCounted`."""

    excluded: frozenset[str]


@dataclass(frozen=True)
class TestGpu:
    """Test a GPU; answered by `GpuTestEnded`."""

    node: str
    gpu: str


@dataclass(frozen=True)
class CheckSpares:
    """Check spares before they are used; answered by `SparesExamined`."""

    nodes: tuple[str, ...]


@dataclass(frozen=True)
class Requeue:
    """Put the job back into the queue, and record that; answered by `RequeueTried`.

    Attributes:
        decision: what was decided.
        excluded: nodes that the job must not use from now on.
        expired: nodes whose exclusion is over.
    """

    decision: Decision
    excluded: frozenset[str]
    expired: frozenset[str]


@dataclass(frozen=True)
class LeaveToSlurm:
    """Wait until Slurm itself requeues the job that it preempts."""


@dataclass(frozen=True)
class StartAgain:
    """Start the ranks on these nodes, after some seconds."""

    nodes: tuple[str, ...]
    wait_s: float = 0.0


@dataclass(frozen=True)
class StartHere:
    """Start the ranks on the nodes that were offered."""


@dataclass(frozen=True)
class EndRun:
    """End the run in this start of the job."""

    outcome: AttemptOutcome


FollowAction = (
    Record
    | LookForPreemption
    | ReadRun
    | FindNodes
    | CountNodes
    | TestGpu
    | CheckSpares
    | Exclude
    | Requeue
    | LeaveToSlurm
    | StartAgain
    | StartHere
    | EndRun
)


# --- what follows -----------------------------------------------------------------------------------------------


def follow(state: FollowState, event: FollowEvent) -> list[FollowAction]:
    """Return what is to be done after an event; the last action is a question, or it ends the matter."""
    match event:
        case AttemptOver():
            state.attempt, state.outcome, state.overdue = event.attempt, event.outcome, event.overdue
            state.tested, state.requeues, state.offered = set(), None, None
            return [ReadRun()]
        case DecisionFound():
            state.outcome = event.outcome
            return [*_exclude(state, event.decision, event.attempt), *_carry_out(state, event.decision)]
        case StopBetween():
            if event.decided is None:
                return _stop_between(state, state.failed)
            state.outcome = _interrupted(state, state.failed)
            return _carry_out(state, event.decided)
        case NodesOffered():
            return _take_offer(state, event)
        case NodesCounted():
            return _leave(state, event.others)
        case RunRead():
            return _take_run(state, event)
        case NodesFound():
            return _decide(state, event.resources)
        case GpuTestEnded():
            return _take_test(state, event)
        case SparesExamined():
            return _take_check(state, event)
        case RequeueTried():
            return _take_requeue(state, event.problem)


def _take_run(state: FollowState, run: RunRead) -> list[FollowAction]:
    """Continue with what the run was read for: a requeue, an attempt that is over, or a stop between attempts."""
    state.run = run
    if state.requeues is not None:
        active = active_exclusions(run.history.exclusions, run.wall)
        excluded = frozenset({*active, *state.requeues.exclude} - state.required)
        expired = run.history.readmitted.union(run.history.exclusions) - excluded - state.unwanted
        return [Requeue(state.requeues, excluded, expired)]
    if state.attempt is None:
        state.outcome = _interrupted(state, state.outcome)
        if state.settings.mode == "off":
            return [EndRun(state.outcome)]
    return [_find_nodes(state, run)]


def _summary(state: FollowState, run: RunRead) -> AttemptSummary:
    """Return what the policy decides on; between attempts nothing has failed."""
    if state.attempt is not None:
        state.attempt.stop, state.attempt.progress = state.stop, run.progress
        return state.attempt.summary(run.wall, state.outcome)
    stop, step = state.stop, run.progress.committed_step
    return AttemptSummary(
        run.wall, run.number, "interrupted", (), step, stop.name, stop.requeued, preempted=stop.preempted
    )


def _find_nodes(state: FollowState, run: RunRead) -> FindNodes:
    """Look outside of the job if it is to leave nodes: it must not ask for more than are left."""
    excluded, attempt = frozenset(active_exclusions(run.history.exclusions, run.wall)), state.attempt
    summary = _summary(state, run)
    look = bool(excluded) or any(fault.role == "root" and fault.scope != "user" for fault in summary.faults)
    settings = state.settings
    weighs = look and attempt is not None and settings.fewest_nodes is not None and settings.heal == "auto"
    in_use = () if attempt is None else attempt.nodes
    return FindNodes(excluded, in_use, look, summary.committed_step if weighs else None)


def _decide(state: FollowState, resources: Resources) -> list[FollowAction]:
    """Have the policy decide; the GPU that it names is tested first, and the spares that it uses are checked."""
    assert state.run is not None
    decision = decide(_summary(state, state.run), state.run.history, resources, state.settings)
    state.considered = decision, resources
    if state.attempt is None:
        assert state.outcome is not None
        return [EndRun(state.outcome)] if decision.action == "finish" else _record(state)
    if state.acts and decision.test_gpu is not None and decision.test_gpu not in state.tested:
        state.tested.add(decision.test_gpu)
        node, gpu = decision.test_gpu
        if decision.root is not None and decision.root.gpu is None:  # then it is the rank that is named
            gpu = str(int(gpu) % state.ranks_per_node)
        return [TestGpu(node, gpu)]
    return _check(state)


def _take_test(state: FollowState, event: GpuTestEnded) -> list[FollowAction]:
    """Decide with one more fault if the GPU computes wrongly."""
    assert state.attempt is not None
    tested, recorded = event.tested, Record(event.tested)
    if tested.ok is not False:
        return [recorded, *_check(state)]
    line = f"{tested.device or f'GPU {tested.gpu}'}: {tested.reason or 'it computes wrongly'}"
    failed = Fault.of_kind(GPU_TEST_FAILED, event.wall, "gpu_test", line, node=tested.node, gpu=tested.gpu)
    noted = [action for action in note(state.attempt, [failed]) if isinstance(action, Record)]
    return [recorded, *noted, ReadRun()]


def _check(state: FollowState) -> list[FollowAction]:
    assert state.attempt is not None and state.considered is not None
    nodes_before = set(state.attempt.nodes)
    fresh = tuple(node for node in state.considered[0].nodes if node not in nodes_before)
    return [CheckSpares(fresh)] if state.acts and fresh else _record(state)


def _take_check(state: FollowState, event: SparesExamined) -> list[FollowAction]:
    """Decide again without the spares that are unfit."""
    assert state.attempt is not None
    if not event.unfit:
        return _record(state)
    number = state.attempt.number
    unfit = event.unfit.items()
    return [*(Exclude((node,), f"spare {node} is not fit: {why}", number) for node, why in unfit), ReadRun()]


def _record(state: FollowState) -> list[FollowAction]:
    """Record how the attempt ended and what was decided, and carry it out."""
    assert state.considered is not None and state.run is not None and state.outcome is not None
    (decision, resources), state.considered = state.considered, None
    summary, actions = _summary(state, state.run), list[FollowAction]()
    if state.attempt is not None:
        state.outcome = state.outcome if state.overdue else _with_root(state.outcome, decision.root)
        if not state.run.is_ended:
            actions.append(Record(AttemptEnded(attempt=summary.attempt, **state.outcome.fields())))
    decided = Decided(
        attempt=summary.attempt,
        mode=state.settings.mode,
        committed_step=summary.committed_step,
        action=decision.action,
        reason=decision.reason,
        root=None if decision.root is None else decision.root.fields(),
        exclude=list(decision.exclude) or None,
        nodes=list(decision.nodes) or None,
        n_nodes=decision.n_nodes,
        test_gpu=None if decision.test_gpu is None else list(decision.test_gpu),
        wait_s=decision.wait_s,
        step_time_ratio=decision.step_time_ratio,
        expected_wait_s=decision.expected_wait_s,
        attempt_state=summary.fields(),
        resources=resources.fields(),
    )
    actions.append(Record(only_known(decided)))
    return [*actions, *_exclude(state, decision, summary.attempt), *_carry_out(state, decision)]


def _exclude(state: FollowState, decision: Decision, attempt: int) -> list[FollowAction]:
    """Return the record of the nodes that a decision excludes: it has until when, and the decision has not."""
    return [Exclude(decision.exclude, decision.reason, attempt)] if decision.exclude and state.acts else []


def _with_root(outcome: AttemptOutcome, root: Fault | None) -> AttemptOutcome:
    """Return the outcome with the policy's root as its cause, unless it names that rank already."""
    cause = outcome.cause
    if root is None or (cause is not None and cause.rank is not None and cause.rank == root.rank):
        return outcome
    code = cause.exit_code if cause is not None else None
    return replace(outcome, cause=Cause(root.line, root.rank, root.node, code, root.step))


# --- carrying out -----------------------------------------------------------------------------------------------


def _carry_out(state: FollowState, decision: Decision) -> list[FollowAction]:
    outcome, stop = state.outcome, state.stop
    assert outcome is not None
    if decision.action == "finish" and decision.reason == SLURM_REQUEUES and outcome.outcome != "completed":
        return [EndRun(replace(outcome, outcome="interrupted", exit_code=Exit.INTERRUPTED))]
    if decision.action == "finish" or not state.acts:
        return [EndRun(outcome)]
    if stop.comes_back and decision.action in IN_PLACE:  # the request came after the decision to start again
        return _stop_between(state, outcome)
    if decision.action == "stop":
        # A wrong configuration has its own exit code.
        is_config = decision.root is not None and decision.root.kind == CONFIG_ERROR
        code = outcome.exit_code if is_config else Exit.STOPPED
        return [EndRun(replace(outcome, outcome="failed", exit_code=code))]
    if stop.asked and not (stop.comes_back and decision.action == "requeue"):
        return [EndRun(_interrupted(state, outcome))]  # a job that was cancelled must not come back
    if decision.action == "requeue":
        state.requeues = decision
        return [ReadRun()]
    state.failed = outcome
    return [StartAgain(decision.nodes, decision.wait_s or 0.0)]


def _stop_between(state: FollowState, outcome: AttemptOutcome | None) -> list[FollowAction]:
    """End the run in this job, or requeue the job: it is asked to stop while no ranks run.

    Args:
        state: of what follows.
        outcome: how the attempt ended that has just ended, or from which the run recovers; None if none failed.
    """
    state.attempt, state.outcome = None, outcome
    asked = [Record(StopAsked(signal=state.stop.name))] if state.stop.name is not None else []
    return [*asked, LookForPreemption(), ReadRun()]


def _interrupted(state: FollowState, failed: AttemptOutcome | None) -> AttemptOutcome:
    """Return the outcome of a run that is asked to stop while it recovers from a failure."""
    message = f"asked to stop ({state.stop.asked_by})"
    if failed is None or failed.outcome not in ("failed", "lost"):
        return AttemptOutcome("interrupted", Exit.INTERRUPTED, failed.cause if failed else None)
    why = f": {failed.cause.message}" if failed.cause else ""
    cause = Cause(f"{message} while it recovered from a failure{why}")
    return AttemptOutcome("interrupted", Exit.INTERRUPTED, cause)


def _take_requeue(state: FollowState, problem: str) -> list[FollowAction]:
    """End the run in this start of the job: Slurm ends this process soon, or refused."""
    decision, state.requeues = state.requeues, None
    assert decision is not None
    if (offered := state.offered) is not None:
        state.offered = None
        if problem:
            return [Record(ExclusionFailed(nodes=compress(decision.exclude), reason=problem)), StartHere()]
        cause = Cause(_why_leave(offered, state.required))
        return [EndRun(AttemptOutcome("interrupted", Exit.INTERRUPTED, cause))]
    assert state.outcome is not None
    outcome = state.outcome
    if not problem:
        return [EndRun(AttemptOutcome("interrupted", Exit.INTERRUPTED, outcome.cause))]
    failed = Record(RequeueFailed(excluded=compress(decision.exclude), reason=problem))
    if state.stop.preempted == "requeue":
        return [failed, LeaveToSlurm(), EndRun(AttemptOutcome("interrupted", Exit.INTERRUPTED, outcome.cause))]
    message = outcome.cause.message if outcome.cause else decision.reason
    cause = replace(outcome.cause or Cause(""), message=f"{message}; the job cannot be requeued: {problem}")
    return [failed, EndRun(AttemptOutcome("failed", Exit.STOPPED, cause))]


# --- excluded nodes ---------------------------------------------------------------------------------------------


def _unwanted(offer: NodesOffered, required: frozenset[str]) -> frozenset[str]:
    return offer.excluded.intersection(offer.nodes) - required


def _why_leave(offer: NodesOffered, required: frozenset[str]) -> str:
    return f"Slurm started the job on {compress(_unwanted(offer, required))}, which the run excludes"


def _take_offer(state: FollowState, offer: NodesOffered) -> list[FollowAction]:
    """Leave excluded nodes if the job can start elsewhere.

    Slurm did not take the exclusion, for example while it ended the job on a dead node, or the run was submitted
    again. The nodes are used if the job could not start elsewhere, or was requeued several times in vain.
    """
    if not (_unwanted(offer, state.required) and state.acts and offer.can_leave):
        return [StartHere()]
    state.offered = offer
    return [CountNodes(offer.excluded)]


def _leave(state: FollowState, others: int | None) -> list[FollowAction]:
    offer = state.offered
    assert offer is not None
    if others is None or others < offer.n_nodes or offer.requeues >= _MOST_REQUEUES:
        state.offered = None
        return [StartHere()]
    reason = f"{_why_leave(offer, state.required)}; requeue"
    state.requeues = Decision("requeue", reason, exclude=tuple(sorted(_unwanted(offer, state.required))))
    return [ReadRun()]
