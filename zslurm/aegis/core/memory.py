"""Recovery in memory: who was lost, who takes their place, and whether that worked.

    lost ranks -> policy/in_memory.py -> Regroup -> recovered, or failed: every rank is started again
    a fault of a node -> its ranks are lost, alive or not (`recover_without`) -> the same
    a node to leave -> HoldForMove -> the same at a step's boundary        (moves.py)

The ranks do the rest (zslurm/train/recovery). While they regroup the attempt is not given up. What fails, or takes
longer than aegis.recovery_s, leaves the attempt as it would have been without: it is ended, and started again.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import replace
from typing import Any

from zslurm.aegis.core.attempt import AttemptState, HangState, MemoryState, Move, Regrouping
from zslurm.aegis.core.messages import (
    NO_ANSWER,
    CheckSpare,
    CoreAction,
    EndRanks,
    Exclude,
    FewerWeighed,
    ForgetReplaced,
    HoldForMove,
    MemoryResumed,
    Record,
    Recovered,
    Regroup,
    SparesChecked,
    StartWarm,
    StoreReported,
    WarmEnded,
    WarmNotStarted,
    WeighFewer,
)
from zslurm.aegis.core.policy.attribution import attribute
from zslurm.aegis.core.policy.in_memory import InMemory, Ranks, plan_in_memory, plan_move, why_not_in_memory
from zslurm.aegis.core.policy.policy import most_excluded
from zslurm.aegis.core.root_cause import roots_of
from zslurm.aegis.fault_kinds import RANK_HANG
from zslurm.aegis.types import Alarm, Fault
from zslurm.run.events import (
    MovePlanned,
    RanksExpelled,
    RanksJoined,
    RanksMoved,
    RecoveredInMemory,
    RecoveryFailed,
    RecoveryReady,
    RecoveryStarted,
    RecoveryUnavailable,
)
from zslurm.run.events.event import only_known
from zslurm.run.exclusions import excluded_by_run
from zslurm.slurm.hostlist import compress
from zslurm.slurm.topology import hostlist_in_order
from zslurm.train.recovery.generation import NEW, Generation, node_of

_ANSWER_S = 1.0
"""Seconds beyond the deadline that the store server gets to report that it has passed."""


def memory_of(state: AttemptState) -> MemoryState:
    """Return the recovery in memory of an attempt that has one."""
    assert state.memory is not None
    return state.memory


# --- what is reported -------------------------------------------------------------------------------------------


def take_report(state: AttemptState, event: StoreReported) -> list[CoreAction]:
    """Take what the store server reports."""
    memory, report = memory_of(state), event.report
    regrouping, number = memory.regrouping, report.get("number")
    match report.get("event"):
        case "warm":
            memory.add_warm(str(report.get("member")))
            if regrouping is not None:
                regrouping.plan_again |= regrouping.awaits_warm
            return announce(state)
        case "recovered" if number == memory.number and regrouping is not None:
            return _recover(state, regrouping, event)
        case "off":
            return _turn_off(state, str(report.get("reason")))
        case "boundary":
            _begin_move(state, number, event.now)
        case "unmoved":
            if memory.move is not None and memory.move.number == number:
                memory.move, memory.held_in_vain = None, True
        case "refused" if memory.overtaken is not None and memory.overtaken.number == number:
            pass  # the generation of a fault came too late: that of a move was there; the next one has both
        case "failed" | "refused" if report.get("number", memory.number) == memory.number and memory.active:
            return give_up(state, str(report.get("reason", "the ranks gave no reason")))
    return []


def take_warm_end(state: AttemptState, event: WarmEnded) -> int | None:
    """Take the end of a process of a warm step; return the rank that it was, if it was one."""
    memory, member = memory_of(state), event.member
    memory.end_start(member)
    memory.take_warm([member])
    if (regrouping := memory.regrouping) is not None:
        on_its_way = member in regrouping.plan.members and member not in memory.members
        regrouping.replacements_lost += on_its_way
        regrouping.plan_again |= on_its_way or regrouping.awaits_warm
    return memory.members.index(member) if member in memory.members else None


def take_not_started(state: AttemptState, event: WarmNotStarted) -> list[CoreAction]:
    """Take that warm processes could not be started: ranks that wait for them are started again."""
    memory = memory_of(state)
    for node in event.action.nodes:
        memory.coming[node] = max(0, memory.coming[node] - event.action.per_node)
    if memory.regrouping is not None and memory.regrouping.awaits_warm:
        return give_up(state, event.reason)
    return [Record(RecoveryUnavailable(attempt=state.number, reason=event.reason))] if event.action.first else []


def take_check(state: AttemptState, event: SparesChecked) -> None:
    """Take the result of a check that was begun in this recovery."""
    memory = memory_of(state)
    if event.round == memory.check_round:
        memory.checks |= event.reasons


def take_weighed(state: AttemptState, event: FewerWeighed) -> None:
    """Take why the ranks must not continue on that number of nodes."""
    memory = memory_of(state)
    memory.fewer[event.nodes] = event.reason
    if event.weighed is not None:
        memory.weighed[event.nodes] = event.weighed


def resume(state: AttemptState, event: MemoryResumed) -> list[CoreAction]:
    """Continue with the generation that an earlier supervisor has published."""
    memory = memory_of(state)
    if memory.given_up:
        return []
    if (generation := event.pending) is not None:
        nodes = tuple(node_of(member) for member in generation.members)
        replaced = {rank for rank in range(generation.former_size) if rank not in generation.former}
        lost = replaced or set(generation.lost)
        memory.regrouping = Regrouping(
            event.now,
            event.now + state.settings.recovery_s + _ANSWER_S,
            lost=lost,
            dead={state.rank_nodes[rank] for rank in lost} & event.died,
            plan=InMemory(generation.members, nodes, generation.former),
            resizes=generation.resizes,
        )
    return announce(state)


# --- what follows -----------------------------------------------------------------------------------------------


def tend(state: AttemptState, now: float, wall: float, broken: str) -> list[CoreAction]:
    """Take that time has passed: have warm processes once the ranks train, and begin, or end, a recovery."""
    memory, actions = memory_of(state), list[CoreAction]()
    regrouping = memory.regrouping
    if regrouping is not None and now > regrouping.deadline:
        if regrouping.awaits_check:
            late = "the check of a spare did not end"
        elif regrouping.awaits_warm:
            late = "no process was ready to take a place"
        else:
            late = "the ranks did not regroup"
        actions += give_up(state, f"{late} within {state.settings.recovery_s:g} s (aegis.recovery_s)")
    if memory.active and broken:
        actions += give_up(state, "the store server of the ranks has ended")
    if state.detector.step >= 0 and not (memory.warm_started or memory.given_up or memory.active):
        actions += [
            *start_warm(memory, _bare(memory, dict.fromkeys(state.rank_nodes)), first=True),
            *start_warm(memory, _bare(memory, memory.spares), memory.per_node, first=True),
        ]
    return [*actions, *_consider(state, now, wall)]


def recover_without(state: AttemptState, now: float, wall: float) -> list[CoreAction]:
    """Begin a recovery without the nodes for whose faults the attempt would be ended, if there are some."""
    memory = state.memory
    if memory is None or memory.given_up or state.stop.asked:
        return []
    faulty = {node: why for node, why in _faulty_nodes(state, wall).items() if node in state.alarm.exclude}
    if not faulty:
        return []
    memory.expelled |= faulty
    return _consider(state, now, wall)


def _faulty_nodes(state: AttemptState, wall: float) -> dict[str, str]:
    """Return the nodes of ranks that the run must leave for a fault, with what it is; none beyond the limit."""
    settings, summary = state.settings, state.confirmed_summary(wall)
    roots = roots_of(summary, settings)
    exclude = attribute(roots, summary, state.history, settings).exclude
    faulty = {
        fault.node: fault.rule.message
        for fault in reversed(roots)
        if fault.rule.in_memory == "node" and fault.node in exclude and fault.node in state.rank_nodes
    }
    if faulty.keys() >= set(state.rank_nodes):  # no rank would be left to continue
        return {}
    allowed = len(_excluded(state, wall) | faulty.keys()) <= most_excluded(settings, len(state.nodes))
    return {node: why for node, why in faulty.items() if node is not None} if allowed else {}


def _excluded(state: AttemptState, wall: float) -> set[str]:
    """Return the nodes that the run excludes, and those that it has left, or found unfit, in this attempt."""
    memory = memory_of(state)
    return excluded_by_run(state.history.exclusions, wall) | memory.left | memory.unfit | state.overcome_nodes


def _consider(state: AttemptState, now: float, wall: float) -> list[CoreAction]:
    """Begin a recovery if ranks were lost that no recovery has taken up yet, or are to leave their nodes."""
    memory = memory_of(state)
    if memory.given_up:
        return []
    dead = state.dead_nodes
    on_dead = {rank for rank, node in enumerate(state.rank_nodes) if node in dead}
    under_way = memory.regrouping
    if under_way is not None or state.lost | on_dead:  # what ended the ranks may be a fault of their node
        memory.expelled |= _faulty_nodes(state, wall)
    gone = state.lost | on_dead | {rank for rank, node in enumerate(state.rank_nodes) if node in memory.expelled}
    if under_way is None and not gone:
        return []
    if under_way is not None and not (gone - under_way.lost or under_way.plan_again):
        return []
    memory.regrouping = regrouping = under_way or Regrouping(now, now + state.settings.recovery_s)
    regrouping.plan_again = False
    regrouping.lost |= gone
    regrouping.dead |= {state.rank_nodes[rank] for rank in on_dead}
    if _step(state) > memory.recovered_at:
        memory.tries = 0
    actions = list[CoreAction]()
    plan = _plan(state, regrouping, actions)
    if plan is None:
        regrouping.plan_again = True
    elif plan.waits:
        regrouping.awaits_warm = True
        actions += [action for node, count in plan.start.items() for action in start_warm(memory, (node,), count)]
    elif plan.possible:
        actions += _publish(state, regrouping, plan, now)
    else:
        actions += give_up(state, plan.reason)
    return actions


def _step(state: AttemptState) -> int:
    """Return the last step that is finished."""
    return max(state.detector.step, memory_of(state).trained)


def ranks_now(
    state: AttemptState, *, lost: Collection[int] = (), unusable: Collection[str] = (), tries: int = 0, **more: Any
) -> Ranks:
    """Return the ranks as the policy decides on them."""
    memory = memory_of(state)
    nodes_left = memory.left | memory.ended_helpers | memory.expelled.keys()
    unusable = frozenset(state.overcome_nodes | nodes_left).union(unusable)
    return Ranks(
        tuple(memory.members), tuple(state.rank_nodes), memory.per_node, frozenset(lost), unusable,
        memory.waiting, memory.coming, _step(state), tries, **more,
    )  # fmt: skip


def _plan(state: AttemptState, regrouping: Regrouping, actions: list[CoreAction]) -> InMemory | None:
    """Return who takes the places of lost ranks, on spares that are fit; None until all that is known."""
    memory = memory_of(state)
    in_use, unknown = len(set(state.rank_nodes)), list[int]()

    def why_not_fewer(nodes: int) -> str:
        if nodes not in memory.fewer:
            unknown.append(nodes)
        return memory.fewer.get(nodes, "it is not known yet")

    fit: bool | None = False
    while fit is False:
        ranks = ranks_now(
            state,
            lost=regrouping.lost,
            unusable=regrouping.dead | memory.unfit | _leaving(memory, memory.number),
            tries=memory.tries + regrouping.replacements_lost,
            ended=frozenset(memory.ended),
            planned=regrouping.planned_members,
        )
        plan = plan_in_memory(ranks, state.faults, most_tries=_most_tries(state), why_not_fewer=why_not_fewer)
        if unknown:
            actions.append(WeighFewer(unknown[0], in_use))
            return None
        fit = has_fit_spares(state, plan, actions)
    regrouping.awaits_check = fit is None
    return plan if fit else None


def _most_tries(state: AttemptState) -> int:
    return max(1, state.settings.retries)


def has_fit_spares(state: AttemptState, plan: InMemory, actions: list[CoreAction]) -> bool | None:
    """Have the spares checked that a plan places ranks on; return whether all are fit, None until that is known.

    One that is not fit is excluded. One whose agent does not answer in time is only not used in this attempt.
    """
    memory = memory_of(state)
    spares = set(plan.nodes).difference(state.rank_nodes)
    if not memory.checks_spares or not spares:
        return True
    if more := spares - memory.checks.keys():
        memory.checks |= dict.fromkeys(more)
        actions.append(CheckSpare(tuple(sorted(more)), memory.check_round))
    if any(memory.checks[node] is None for node in spares):
        return None
    unfit = {node: reason for node in sorted(spares) if (reason := memory.checks[node])}
    memory.unfit |= unfit.keys()
    actions += [
        Exclude((node,), f"spare {node} is not fit: {reason}", state.number)
        for node, reason in unfit.items()
        if reason != NO_ANSWER
    ]
    return not unfit


def why_not(state: AttemptState, lost: Collection[int]) -> str:
    """Return why ranks could not be replaced if they were lost now; empty if they could."""
    if state.memory is None:
        return "this attempt has no recovery in memory"
    ranks = ranks_now(state, lost=lost, tries=state.memory.tries, ended=frozenset(lost))
    return plan_in_memory(ranks, state.faults, most_tries=_most_tries(state)).reason


def leave_to_restart(state: AttemptState, root: Fault | None) -> list[CoreAction]:
    """Record why a fault that ends the attempt is not recovered from in memory."""
    if root is None or state.memory is None or state.memory.given_up:
        return []
    return give_up(state, why_not_in_memory(root))


def give_up(state: AttemptState, reason: str, ranks: Collection[int] = ()) -> list[CoreAction]:
    """Recover nothing in memory any more in this attempt."""
    memory = memory_of(state)
    lost = set(ranks).union(memory.regrouping.lost if memory.regrouping is not None else ())
    memory.regrouping, memory.given_up, memory.move = None, True, None
    _forget_checks(memory)
    failed = RecoveryFailed(attempt=state.number, generation=memory.number, ranks=sorted(lost), reason=reason)
    return [Record(failed)]


def _turn_off(state: AttemptState, reason: str) -> list[CoreAction]:
    """Recover nothing in memory, though nothing was lost so far."""
    memory = memory_of(state)
    if memory.active:
        return give_up(state, reason)
    if memory.given_up:
        return []
    memory.given_up, memory.move = True, None
    return [Record(RecoveryUnavailable(attempt=state.number, reason=reason))]


def start_warm(
    memory: MemoryState, nodes: tuple[str, ...], per_node: int = 1, *, first: bool = False
) -> list[CoreAction]:
    """Have a number of warm processes started on each of these nodes."""
    memory.warm_started = True
    if not nodes or per_node < 1:
        return []
    memory.coming.update(dict.fromkeys(nodes, per_node))
    return [StartWarm(nodes, per_node, first)]


def announce(state: AttemptState) -> list[CoreAction]:
    """Record once that every node has a process which waits."""
    memory = memory_of(state)
    if memory.announced or not set(state.rank_nodes) <= memory.waiting.keys():
        return []
    memory.announced = True
    nodes = hostlist_in_order(tuple(node for node in memory.waiting if node not in state.overcome_nodes))
    return [Record(RecoveryReady(attempt=state.number, nodes=nodes))]


def _publish(state: AttemptState, regrouping: Regrouping, plan: InMemory, now: float) -> list[CoreAction]:
    """Have the ranks regroup with the members of a plan."""
    memory, recovery_s = memory_of(state), state.settings.recovery_s
    if memory.move is not None and memory.move.number > memory.number:
        memory.overtaken, memory.move = memory.move, None
    memory.held_in_vain = False
    memory.number += 1
    regrouping.resizes |= bool(plan.former)
    if regrouping.resizes and not plan.former:  # ranks that may be at it continue from the same copies
        former = tuple(NEW if rank in regrouping.lost else rank for rank in range(len(plan.members)))
        plan = replace(plan, former=former)
    regrouping.plan, regrouping.awaits_warm = plan, False
    regrouping.deadline = now + recovery_s + _ANSWER_S
    lost = tuple(sorted(regrouping.lost))
    weighed = memory.weighed.get(len(set(plan.nodes))) if plan.former else None
    started = RecoveryStarted(
        attempt=state.number,
        generation=memory.number,
        ranks=list(lost),
        members=None if plan.former else [plan.members[rank] for rank in lost],
        step_time_ratio=None if weighed is None else round(weighed.step_time_ratio, 4),
        lost_s=None if weighed is None else round(weighed.lost_s, 1),
        expected_wait_s=None if weighed is None else weighed.expected_wait_s,
        helper_wait_s=None if weighed is None else weighed.helper_wait_s,
        helper_lost_s=None
        if weighed is None or weighed.helper_lost_s is None
        else round(weighed.helper_lost_s, 1),
        heal=None if weighed is None else weighed.best,
    )
    nodes_left = memory.left | memory.expelled.keys() | _leaving(memory, memory.number)
    generation = Generation(
        memory.number, plan.members, () if plan.former else lost, recovery_s, left=tuple(sorted(nodes_left)),
        former=plan.former, former_size=len(memory.members) if plan.former else 0,
    )  # fmt: skip
    return [*_expel(state), Record(only_known(started)), Regroup(generation), *_end_expelled(state)]


def _expel(state: AttemptState) -> list[CoreAction]:
    """Record that ranks leave their nodes for a fault, for each node once."""
    memory, actions = memory_of(state), list[CoreAction]()
    for node, why in memory.expelled.items():
        if node not in memory.told:
            memory.told.add(node)
            ranks = [rank for rank, at in enumerate(state.rank_nodes) if at == node]
            actions.append(Record(RanksExpelled(attempt=state.number, ranks=ranks, nodes=[node], reason=why)))
    return actions


def _end_expelled(state: AttemptState) -> list[CoreAction]:
    """Have ranks killed that others replace: they end by themselves unless a device call holds them."""
    memory = memory_of(state)
    at = enumerate(state.rank_nodes)
    ranks = tuple((rank, node) for rank, node in at if node in memory.expelled and rank not in state.lost)
    return [EndRanks(ranks)] if ranks else []


def _recover(state: AttemptState, regrouping: Regrouping, event: StoreReported) -> list[CoreAction]:
    """Take that the newest generation trains: its processes are the ranks now."""
    memory, plan, lost = memory_of(state), regrouping.plan, frozenset(regrouping.lost)
    report, now = event.report, event.now
    step, rolled_back = int(report.get("step", -1)), int(report.get("rolled_back", 0))
    size = len(memory.members)
    resized = len(plan.members) != size
    joined = list(range(size, len(plan.members)))
    memory.take_warm(set(plan.members).difference(memory.members))
    memory.members = list(plan.members)
    memory.spares = tuple(node for node in memory.spares if node not in plan.nodes)
    seconds, nodes = round(now - regrouping.began, 3), hostlist_in_order(tuple(dict.fromkeys(plan.nodes)))
    move, memory.move, memory.overtaken = memory.move, None, None
    # Exclusions come first: a supervisor that finds the recovery recorded does not exclude a node for it.
    actions, dead = list[CoreAction](), frozenset(regrouping.dead)
    faulty = sorted(memory.expelled.keys() & {state.rank_nodes[rank] for rank in lost})
    excluded = _excluded(state, event.wall).union(faulty)
    room = max(0, most_excluded(state.settings, len(state.nodes)) - len(excluded))
    # Beyond the limit nodes are only left: Slurm knows of those that died, as in `Policy.over_a_limit`.
    if excludable := tuple(sorted(dead - excluded)[:room]):
        how = "the ranks of the others continue" if resized else "its ranks continue on a spare"
        actions.append(Exclude(excludable, f"{compress(excludable)} died, and {how}", state.number))
    if joined:
        joining = RanksJoined(
            attempt=state.number, generation=memory.number, ranks=joined, step=step, rolled_back=rolled_back,
            world_size=len(memory.members), seconds=seconds, nodes=nodes,
        )  # fmt: skip
        actions.append(Record(joining))
    for node in faulty:
        how = "the ranks of the others continue" if resized else "its ranks continue on a spare"
        actions.append(Exclude((node,), f"{node}: {memory.expelled[node]}, and {how}", state.number))
        memory.leave(node)
    if move is not None and move.off:
        memory.leave(move.off)
        reason, is_asked = f"the ranks moved off it: {move.reason}", move.request is not None
        if is_asked or len(excludable) < room:
            actions.append(Exclude((move.off,), reason, state.number, is_asked))
        moved = RanksMoved(
            attempt=state.number, generation=memory.number, off=move.off, ranks=list(move.ranks), step=step,
            rolled_back=rolled_back, seconds=seconds, nodes=nodes, reason=move.reason, request=move.request,
        )  # fmt: skip
        actions.append(Record(moved))
    by_fault = sorted(lost.difference(() if move is None else move.ranks))
    if by_fault or not (joined or (move is not None and move.off)):  # processes that were to join may be lost
        recovered = RecoveredInMemory(
            attempt=state.number, generation=memory.number, ranks=by_fault, step=step, rolled_back=rolled_back,
            seconds=seconds, nodes=nodes, world_size=len(memory.members) if resized and not joined else None,
        )  # fmt: skip
        actions.append(Record(recovered))
    members = dict.fromkeys(range(size) if resized else lost, "")
    members |= {rank: member for rank, member in enumerate(memory.members) if rank in members}
    state.nodes_heard.forget(dead)
    actions.append(ForgetReplaced(members, dead))
    memory.regrouping, memory.ended = None, set()
    _forget_checks(memory)
    memory.recovered_at, memory.tries, memory.announced = step, memory.tries + 1, False
    take_recovery(state, Recovered(lost, dead, frozenset(memory.left), resized, plan.nodes, now))
    replaced = [*sorted(lost), *joined] if joined or not resized else []
    used = dict.fromkeys(plan.nodes[rank] for rank in replaced)
    return [*actions, *start_warm(memory, _bare(memory, used))]


def _bare(memory: MemoryState, nodes: Iterable[str]) -> tuple[str, ...]:
    """Return the nodes, of these, on which no process waits or is being started."""
    return tuple(node for node in nodes if not (memory.waiting.get(node) or memory.coming[node]))


def _forget_checks(memory: MemoryState) -> None:
    """Have each spare checked again before its next use, and fewer nodes weighed again."""
    memory.checks, memory.fewer, memory.weighed, memory.check_round = {}, {}, {}, memory.check_round + 1


def take_recovery(state: AttemptState, event: Recovered) -> None:
    """Forget what took these ranks and nodes: other processes are in their place, and the others continue."""
    gone = set(event.ranks)
    state.replaced |= gone
    state.lost -= gone
    state.left_in_order -= gone
    state.changes.append((frozenset(gone), event.left_out))
    if event.left_out:
        state.lost, state.left_in_order = (
            {rank - sum(gone_rank < rank for gone_rank in gone) for rank in ranks}
            for ranks in (state.lost, state.left_in_order)
        )
    state.overcome_nodes |= event.dead
    state.failures = [failure for failure in state.failures if not set(failure.ranks) <= gone]
    state.faults = [
        fault
        for fault in state.faults
        if fault.rule.in_memory != "rank"
        and fault.role not in ("cascade", "teardown")
        and fault.node not in event.left
        and fault.kind != RANK_HANG
    ]
    if not state.lost:
        state.failed_at = None
    state.alarm, state.assessed, state.hang = Alarm(give_up=False), -1, HangState()
    if event.rank_nodes is None:
        return
    state.rank_nodes = list(event.rank_nodes)
    state.nodes = tuple(dict.fromkeys(event.rank_nodes))
    if event.left_out:
        state.detector.begin(state.number, state.rank_nodes, event.now, adopted=True)
    else:
        for rank in event.ranks:
            state.detector.move(rank, state.rank_nodes[rank])
    state.detector.regroup(event.now)


# --- planned moves ----------------------------------------------------------------------------------------------


def _leaving(memory: MemoryState, number: int) -> set[str]:
    """Return the node that ranks leave in generations up to `number`."""
    move = memory.move
    return {move.off} if move is not None and move.off and move.number <= number else set()


def plan_of_move(state: AttemptState, off: str, unfit: Collection[str]) -> InMemory:
    """Return who would continue as the ranks of a node, or why that is not possible now."""
    return plan_move(ranks_now(state), off, unfit=unfit)


def hold_for_move(
    state: AttemptState, off: str, plan: InMemory, reason: str, request: str | None
) -> list[CoreAction]:
    """Have the ranks of a node move at the next step's boundary."""
    ranks = tuple(rank for rank, node in enumerate(state.rank_nodes) if node == off)
    move = Move(off, plan, ranks, memory_of(state).number + 1, reason, request)
    planned = MovePlanned(
        attempt=state.number, off=off, to=plan.nodes[ranks[0]], ranks=list(ranks), reason=reason, request=request
    )
    return [Record(planned), *hold(state, move)]


def hold(state: AttemptState, move: Move) -> list[CoreAction]:
    """Have the ranks regroup at the next step's boundary: some move, or others join."""
    memory, plan = memory_of(state), move.plan
    _forget_checks(memory)
    memory.move = move
    generation = Generation(
        move.number, plan.members, move.ranks, state.settings.recovery_s, left=(move.off,) if move.off else (),
        former=plan.former, former_size=len(memory.members) if plan.former else 0,
    )  # fmt: skip
    return [HoldForMove(generation)]


def _begin_move(state: AttemptState, number: object, now: float) -> None:
    """Note that all ranks hold at the boundary of a move, and that its generation is published."""
    memory = memory_of(state)
    move = memory.move or memory.overtaken
    if move is None or move.number != number or memory.given_up:
        return
    faulty, deadline = memory.regrouping, now + state.settings.recovery_s + _ANSWER_S
    memory.regrouping = regrouping = faulty or Regrouping(now, deadline)
    regrouping.lost |= set(move.ranks)
    gone = set(move.plan.members).difference(memory.members, *memory.waiting.values())  # while the ranks held
    regrouping.plan_again = faulty is not None or bool(gone)  # at the same moment: one more generation has both
    if memory.move is not None:
        memory.number, regrouping.plan, regrouping.deadline = move.number, move.plan, deadline
    regrouping.resizes |= bool(move.plan.former)
    memory.move = move
