"""What follows from an event for an attempt that runs: its next state, and what the shell is to do.

    reports, ends of ranks, Slurm's word -> faults            (noticing)
    lost ranks -> are they replaced in memory?                   (memory.py)
    nodes to leave -> planned moves                              (moves.py)
    faults, time -> does the attempt continue?                   (assessing, hanging.py)

The attempt ends by itself, or by the action `GiveUp`. What follows then is decided in following.py.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

from zslurm.aegis.core import hanging, helpers, memory, moves
from zslurm.aegis.core.attempt import GONE, AttemptState
from zslurm.aegis.core.detection.attempt_progress import GONE_S
from zslurm.aegis.core.detection.sensor_faults import has_an_end
from zslurm.aegis.core.messages import (
    AgentGivenUp,
    AskAbout,
    Cleared,
    CoreAction,
    CoreEvent,
    DrainsRead,
    EndRead,
    FaultsFound,
    FewerWeighed,
    GiveUp,
    HangExamined,
    HelperAsked,
    HelperEnded,
    HelperStarted,
    LookForCancel,
    LookForPreemption,
    LookupsFailed,
    MemoryResumed,
    MoveRequested,
    NodeAskedAbout,
    NodeUnreachable,
    Paused,
    ProgressRead,
    RanksFailed,
    RanksKilled,
    ReadEnd,
    ReadLastWords,
    Record,
    Recovered,
    ReportReceived,
    Resumed,
    SlurmAnswered,
    SparesChecked,
    StepCancelled,
    StopChanged,
    StoreGone,
    StoreReported,
    Tick,
    WarmEnded,
    WarmNotStarted,
)
from zslurm.aegis.core.policy.history import fault_of
from zslurm.aegis.core.policy.outcome import stopped_in_order
from zslurm.aegis.core.policy.policy import alarm
from zslurm.aegis.core.root_cause import is_orderly, stalled_networks, without_overcome
from zslurm.aegis.fault_kinds import AGENT_LOST, NET_CONFIG, NODE_DEAD, RANK_HANG, SENSOR_UNAVAILABLE, STRAGGLER
from zslurm.aegis.protocol import AgentReport, SensorReport
from zslurm.aegis.types import OF_STEP, Fault
from zslurm.run.events import (
    FaultDetected,
    RanksEnded,
    RanksExpelled,
    RanksJoined,
    RanksMoved,
    RecoveredInMemory,
    StepKilled,
    StopAsked,
)
from zslurm.run.events.event import only_known
from zslurm.slurm.on_nodes.srun_output import TaskFailure

OF_RANKS = OF_STEP | {"rank", "log"}
"""Sources of the faults that what ranks recorded and logged shows (`ReadLastWords`)."""

_ASSESS_S = 1.0
"""Seconds between two assessments of the same faults: only time passes, and each looks into the run's files."""


def step(state: AttemptState, event: CoreEvent) -> tuple[AttemptState, list[CoreAction]]:
    """Return the state of an attempt after an event, and the actions that follow from it, in their order.

    The state is changed in place: it holds thousands of ranks.
    """
    actions: list[CoreAction] = []
    match event:
        case Resumed():
            actions = _resume(state, event)
        case StopChanged():
            state.stop = event.stop
        case ProgressRead():
            state.progress = event
        case Paused():
            _excuse(state, event.seconds, event.now)
        case ReportReceived():
            actions = _take_report(state, event)
        case AgentGivenUp():
            state.nodes_heard.give_up_agent(event.node)
        case SlurmAnswered():
            state.nodes_heard.take_slurm_states(event.states, event.down)
        case NodeUnreachable():
            state.nodes_heard.take_unreachable(event.node, event.reason)
        case NodeAskedAbout():
            state.nodes_heard.take_witnesses(event.node, event.report)
        case Cleared():
            state.cleared_at = event.now
        case RanksFailed():
            actions = _take_failure(state, event)
        case EndRead():
            actions = _take_end(state, event)
        case FaultsFound():
            actions = note(state, event.faults)
        case StepCancelled():
            actions = note(state, [event.fault]) if state.cancelled is None else []
        case LookupsFailed():
            actions = _take_lookups(state, event)
        case Recovered():
            memory.take_recovery(state, event)
        case Tick():
            actions = _detect(state, event) if event.over else _tick(state, event)
        case HangExamined():
            actions = [Record(row) for row in event.recorded]
            actions += note(state, event.faults)
            actions += hanging.take_examination(state, event)
        case RanksKilled():
            actions = hanging.take_killed(state, event)
        case MemoryResumed():
            actions = memory.resume(state, event)
        case StoreReported():
            actions = memory.take_report(state, event)
        case StoreGone():
            actions = _take_store_gone(state, event)
        case WarmEnded():
            actions = _take_warm_end(state, event)
        case WarmNotStarted():
            actions = memory.take_not_started(state, event)
        case SparesChecked():
            memory.take_check(state, event)
        case FewerWeighed():
            memory.take_weighed(state, event)
        case MoveRequested():
            moves.take_request(state, event)
        case HelperAsked() if state.memory is not None:
            helpers.take_asked(state, event)
        case HelperStarted() if state.memory is not None:
            helpers.take_start(state, event)
        case HelperEnded() if state.memory is not None:
            helpers.take_end(state, event)
        case DrainsRead():
            actions = note(state, moves.drains(state, event))
    if actions and isinstance(given_up := actions[-1], GiveUp):
        actions[-1:] = [*memory.leave_to_restart(state, given_up.root), given_up]
    return state, actions


def _tick(state: AttemptState, event: Tick) -> list[CoreAction]:
    """Detect what time shows, have lost ranks replaced in memory, move ranks as planned, or end the attempt."""
    actions = _detect(state, event)
    # Ranks that are asked to stop save and stop after they have regrouped; no recovery is begun for them.
    if state.memory is not None and (state.memory.active or not state.stop.asked):
        actions += memory.tend(state, event.now, event.wall, event.broken)
        if state.memory.active:
            return actions
    actions += moves.tend_moves(state, event.now, event.wall)
    actions += helpers.tend_helpers(state, event.now)
    if (given_up := _why_give_up(state, event)) is not None:
        actions += memory.recover_without(state, event.now, event.wall)
        if state.memory is not None and state.memory.active:
            return actions
        actions += hanging.give_up(state, given_up, event)
    return actions


def _take_store_gone(state: AttemptState, event: StoreGone) -> list[CoreAction]:
    """Take that the store server did not take a generation."""
    if not event.move:
        return memory.give_up(state, "the store server of the ranks is gone")
    move, memory.memory_of(state).move = memory.memory_of(state).move, None
    if move is not None and not move.off:
        return memory.give_up(state, "the store server of the ranks is gone")
    return moves.refuse(state, state.moves.wishes[0], "the store server is gone")


def _take_warm_end(state: AttemptState, event: WarmEnded) -> list[CoreAction]:
    """Take the end of a process of a warm step; an earlier supervisor may have noted that it was a rank."""
    rank = memory.take_warm_end(state, event)
    if rank is None or rank in state.lost:
        return []
    failure = TaskFailure(event.failure.node, (rank,), event.failure.what)
    return _note_end(state, failure, event.ends, event.now, 0.0, warm=True)


# --- noticing ---------------------------------------------------------------------------------------------------


def note(state: AttemptState, faults: Iterable[Fault]) -> list[CoreAction]:
    """Remember and record faults; what no node's sensor can read is recorded once, and not for every node."""
    actions: list[CoreAction] = []
    for observed in faults:
        by_launcher = observed.source == "srun" and not state.on_slurm
        fault = replace(observed, source="launcher") if by_launcher else observed
        state.faults.append(fault)
        if fault.kind == SENSOR_UNAVAILABLE:
            if (fault.line, fault.cleared) in state.reported:
                continue
            state.reported.add((fault.line, fault.cleared))
        actions.append(Record(_event_of(fault, state.number)))
    return actions


def _event_of(fault: Fault, attempt: int) -> FaultDetected:
    """Return the event of a fault, without what is not known of it."""
    event = FaultDetected(
        attempt=attempt, fault_time=fault.time, kind=fault.kind, role=fault.role, scope=fault.scope,
        source=fault.source, line=fault.line, node=fault.node, gpu=fault.gpu, nic=fault.nic, rank=fault.rank,
        step=fault.step, cleared=fault.cleared or None, fingerprint=fault.fingerprint,
    )  # fmt: skip
    return only_known(event)


def _take_report(state: AttemptState, event: ReportReceived) -> list[CoreAction]:
    report = event.report
    state.detector.feed(report, event.now, event.wall)
    if isinstance(report, SensorReport) and report.first:
        state.unconfirmed.pop((report.stamp.node, report.sensor), None)
    if isinstance(report, AgentReport) and report.event == "signalled":
        return [LookForPreemption()]
    return []


def _take_failure(state: AttemptState, event: RanksFailed) -> list[CoreAction]:
    """Take bad ends of ranks, and forget what agents reported of them before."""
    state.ends_taken += 1
    if (failure := state.of_ranks(event.failure)) is None:
        return []
    state.failures = state.without_reports_of(failure.ranks)
    return _note_end(state, failure, event.ends, event.now, 0.0)


def _take_end(state: AttemptState, event: EndRead) -> list[CoreAction]:
    """Take a rank whose process is gone by its agent, and whose end srun has not reported in time.

    While slurmctld is away srun may not hear of it (26.05). A rank that recorded an end in order is none of these:
    it could only not remove its progress any more.
    """
    if event.end is not None and is_orderly(event.end):
        state.left_in_order.add(event.rank)
        return []
    failure = TaskFailure(state.rank_nodes[event.rank], (event.rank,), GONE)
    ends = {} if event.end is None else {event.rank: event.end}
    return _note_end(state, failure, ends, event.now, event.gone_s, by_agent=True)


def _note_end(
    state: AttemptState,
    failure: TaskFailure,
    ends: Mapping[int, Mapping[str, Any]],
    now: float,
    ago_s: float,
    *,
    by_agent: bool | None = None,
    warm: bool | None = None,
) -> list[CoreAction]:
    """Take the bad end of ranks, `ago_s` seconds ago; its event has who reported it, and of whom."""
    state.failures.append(failure)
    ended = RanksEnded(
        attempt=state.number, ranks=list(failure.ranks), node=failure.node, what=failure.what,
        by_agent=by_agent, warm=warm,
    )  # fmt: skip
    actions: list[CoreAction] = [Record(only_known(ended))]
    if stopped_in_order(failure, ends, asked=state.asked):
        return actions
    state.lost |= set(failure.ranks)
    state.failed_at = state.failed_at or now
    if may_be_cancelled(state):
        actions.append(LookForCancel())
    return [*actions, ReadLastWords(failure, ago_s)]


def may_be_cancelled(state: AttemptState) -> bool:
    """Return whether to look for a cancelled step: this supervisor has not ended it."""
    return not (state.asked or state.killed_before or state.cancelled is not None)


def _take_lookups(state: AttemptState, event: LookupsFailed) -> list[CoreAction]:
    """Take tries to resolve a name that last too long, once for a node."""
    failed, node = event.failed, event.node
    lasted = failed.last - failed.first
    is_known = any(fault.kind == NET_CONFIG and fault.node == node for fault in state.faults)
    if is_known or lasted < state.settings.tolerate_s:
        return []
    line = f"torch has tried for {lasted:.0f} s to resolve the name {failed.name}: {failed.reason}"
    return note(state, [Fault.of_kind(NET_CONFIG, failed.first, "log", line, scope="node", node=node)])


def _detect(state: AttemptState, event: Tick) -> list[CoreAction]:
    """Find dead nodes, ranks that hang and the like; what is left of an attempt that is over does not hang."""
    failed = {node: f"Slurm reports node {node} as failed" for node in event.failed_nodes}
    if not state.has_agents:
        new = [node for node in failed if node not in state.dead_nodes]
        return note(state, [Fault.of_kind(NODE_DEAD, event.wall, "srun", failed[n], node=n) for n in new])
    faults = state.detector.check(
        event.now,
        event.wall,
        dead=failed,
        lost_peers=_has_unexplained_losses(state, event),
        ended_at=state.cleared_at,
        own_node=state.own_node,
        halted_by=_halted_by(state, event),
    )
    # Nothing hangs that is over, and ranks that regroup wait for each other. A helper that is over has no agent;
    # after the end of an attempt a silent agent may have ended with its helper job, which only Slurm knows.
    waits = event.over or (state.memory is not None and state.memory.active)
    ended = state.memory.ended_helpers if state.memory is not None else set()
    may_have_ended = set(state.memory.nodes_of_helpers) if state.memory is not None and event.over else set()
    faults = [
        fault
        for fault in faults
        if fault.kind not in (NODE_DEAD, AGENT_LOST)
        or not (fault.node in ended or (fault.node in may_have_ended and fault.node not in failed))
    ]
    actions = note(state, (fault for fault in faults if not (waits and fault.kind == RANK_HANG)))
    if state.on_slurm:
        asked = state.nodes_heard.begin_questions(event.now, state.nodes)
        actions += (AskAbout(name, neighbours) for name, neighbours in asked.items())
    if event.over:
        return actions
    gone = state.detector.gone(event.now)
    unknown = sorted(gone.keys() - state.lost - state.left_in_order)
    return [*actions, *(ReadEnd(rank, gone[rank]) for rank in unknown)]


def _halted_by(state: AttemptState, event: Tick) -> set[str | None]:
    """Return the nodes that explain why no step is finished; with None if ranks have ended, or were ended."""
    dead = {fault.node for fault in state.faults if fault.kind == NODE_DEAD}
    ended: set[str | None] = {None} if event.over or state.failed_at is not None else set()
    return ended | dead | stalled_networks(state.faults)


def _has_unexplained_losses(state: AttemptState, event: Tick) -> bool:
    """Return whether ranks have lost peers, so that a node that misses heartbeats is dead.

    While they run, anything that may be the root explains it. Once they are over, none of them can show any more
    that its node lives, and nodes often die together: then only an error that the program itself recorded does, or
    a network that is down.
    """
    if state.failed_at is None:
        return False
    if not event.over:
        return not state.has_root(event.wall)
    by_program = any(f.role == "root" and f.source == "rank" and f.scope == "user" for f in state.faults)
    return not (by_program or stalled_networks(state.faults))


def _excuse(state: AttemptState, seconds: float, now: float) -> None:
    """Move every limit of time: the supervisor was stopped, and the ranks were, too."""
    state.detector.excuse(seconds, now)
    if state.stop.deadline is not None:
        state.stop_later_s += seconds
    if state.cleared_at is not None:
        state.cleared_at = min(now, state.cleared_at + seconds)
    if state.failed_at is not None:
        state.failed_at = min(now, state.failed_at + seconds)
    if state.hang.until is not None:
        state.hang.until += seconds
    if state.memory is not None and (regrouping := state.memory.regrouping) is not None:
        regrouping.deadline += seconds
    for wish in state.moves.wishes:
        wish.since += seconds


def _resume(state: AttemptState, event: Resumed) -> list[CoreAction]:
    """Take over what an earlier supervisor has noticed and recorded, so that it is not noticed again.

    It may have died between the two records of a failure, the end of the ranks and the fault.
    """
    explained = True
    by_agents: list[TaskFailure] = []
    expelled: set[str] = set()
    by_agent: RanksEnded | None = None  # the last end that an agent reported, while no fault was recorded
    for recorded in event.recorded:
        match recorded:
            case RecoveredInMemory():
                left_out = recorded.world_size is not None
                dead = frozenset(state.dead_nodes)
                ranks = frozenset(recorded.ranks or ())
                memory.take_recovery(state, Recovered(ranks, dead, frozenset(expelled), left_out))
                by_agents, explained, by_agent = [], True, None
            case RanksExpelled():
                expelled |= set(recorded.nodes or ())
            case RanksJoined():
                memory.take_recovery(state, Recovered(frozenset(), left_out=True))
            case RanksMoved():
                memory.take_recovery(state, Recovered(frozenset(recorded.ranks), left=frozenset([recorded.off])))
            case RanksEnded():
                if recorded.warm:
                    state.lost |= set(recorded.ranks)
                elif recorded.by_agent:
                    by_agents.append(TaskFailure(recorded.node, tuple(recorded.ranks), recorded.what))
                    by_agent = recorded
                    continue
                else:
                    state.ends_taken += 1
                explained = False
            case FaultDetected():
                if (fault := fault_of(recorded)) is not None:
                    state.faults.append(fault)
                    explained = explained or fault.source in OF_RANKS
                    by_agent = None if by_agent is not None and fault.rank in by_agent.ranks else by_agent
        state.asked_before |= isinstance(recorded, StopAsked)
        state.killed_before |= isinstance(recorded, StepKilled)
    state.detector.restore(state.faults)
    until = event.wall + state.settings.heartbeat_timeout_s
    state.unconfirmed = {(f.node, f.source): until for f in state.faults if has_an_end(f)}
    of_srun = event.in_log[: state.ends_taken]
    state.failures = [reduced for failure in of_srun if (reduced := state.of_ranks(failure)) is not None]

    def is_orderly_stop(failure: TaskFailure) -> bool:
        return stopped_in_order(failure, event.ends, asked=state.asked)

    unexplained = [
        ReadLastWords(task_failure)
        for task_failure in state.failures[-1:]
        if not (explained or is_orderly_stop(task_failure))
    ]
    reported = {rank for failure in state.failures for rank in failure.ranks}
    state.failures += [failure for failure in by_agents if not reported & set(failure.ranks)]
    if by_agent is not None and not reported & set(by_agent.ranks):
        unexplained.append(ReadLastWords(by_agents[-1], event.wall - by_agent.time + GONE_S))
    for failure in state.failures:
        if not is_orderly_stop(failure):
            state.failed_at = event.now
            state.lost |= set(failure.ranks)
    return [*unexplained]


# --- assessing --------------------------------------------------------------------------------------------------


def _why_give_up(state: AttemptState, event: Tick) -> GiveUp | None:
    """Return why the attempt must be ended now; None while there is reason to wait.

    If ranks complain of lost peers, and nothing is known of those, their node may be dead. The agents find out;
    without them Slurm does (SlurmdTimeout), and gets the time to do so.
    """
    aegis, stop, now = state.settings, state.stop, event.now
    if stop.deadline is not None and now > stop.deadline + state.stop_later_s:
        asked = f"when asked to ({stop.asked_by})"
        why = f"the ranks did not save and stop within {aegis.save_s:g} s (aegis.save_s) {asked}"
        return GiveUp(why, overdue=True)
    if event.broken:
        return GiveUp(event.broken)
    if state.is_assessment_due(now):
        _assess_faults(state, event)
    if state.alarm.give_up:
        return GiveUp(state.alarm.reason, state.alarm.root)
    if state.failed_at is None:
        return None
    if state.has_root(event.wall):
        patience = aegis.settle_s
        why = f"the other ranks did not end within {aegis.settle_s:g} s of the first"
    elif state.nodes_heard.any_responding(now):
        patience = aegis.grace_s
        why = f"ranks lost their peers, and nothing else was found within {aegis.grace_s:g} s"
    else:
        patience = max(aegis.lost_peer_s, aegis.grace_s)
        why = f"ranks lost their peers, and Slurm named no failed node within {aegis.lost_peer_s:g} s"
    return GiveUp(why) if now > state.failed_at + patience else None


def _assess_faults(state: AttemptState, event: Tick) -> None:
    """Find out whether the faults end the attempt; those that it overcame are forgotten."""
    if state.has_serious_faults:
        summary = state.summary(event.wall)
        if state.settings.mode == "act":
            confirmed = state.confirmed_summary(event.wall)
            state.alarm = alarm(confirmed, state.history, state.settings, spares=_spares(state))
        state.faults = without_overcome(summary, state.settings)
    state.assessed, state.assess_at = len(state.faults), event.now + _ASSESS_S


def _spares(state: AttemptState) -> int:
    """Return the spares that the alarm counts: none while a planned move is the use that there is for one."""
    slow = [f for f in state.faults if f.kind == STRAGGLER and f.role == "root" and not f.cleared]
    return 0 if slow and all(fault.node in state.moves.nodes for fault in slow) else state.spares
