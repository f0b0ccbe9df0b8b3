"""Planned moves: nodes that the ranks should leave, asked for by people, or by the policy.

    `zslurm requeue --off`           -> MoveRequested
    Slurm drains a node     -> DrainsRead -> a fault
    advisory faults         -> policy/planned_moves.py      all of them -> one node after the other -> memory.py

Only a spare on which warm processes wait takes a node's place, so a node waits for its move until there are some.
A request of a person is always answered, by the event `ranks_moved` or `move_refused`. What a fault interrupts is
tried again. A node that was left is excluded like one that failed: no later attempt of this run uses it.
"""

from __future__ import annotations

from collections.abc import Collection

from zslurm.aegis.core.attempt import AttemptState, MemoryState, MoveWish
from zslurm.aegis.core.memory import has_fit_spares, hold_for_move, plan_of_move
from zslurm.aegis.core.messages import CoreAction, DrainsRead, MoveRequested, Record
from zslurm.aegis.core.policy.planned_moves import KINDS, nodes_to_leave
from zslurm.aegis.fault_kinds import NODE_DRAINED
from zslurm.aegis.types import Fault
from zslurm.run.events import MoveRefused
from zslurm.slurm.hostlist import compress

_SPARE_READY_S = 600.0
"""Seconds that a request waits for a spare whose processes are not ready yet."""
_MOST_TRIES = 3


def take_request(state: AttemptState, event: MoveRequested) -> None:
    """Note a node that a person asks to leave, unless that was answered."""
    if (event.request, event.node) not in state.moves.answered:
        state.moves.wishes.append(MoveWish(event.node, event.reason, event.request, event.now))


def drains(state: AttemptState, event: DrainsRead) -> list[Fault]:
    """Return faults for nodes of ranks that Slurm drains since the last answer, and for those that it does not."""
    faults, drained = [], state.moves.drained
    for node in sorted(set(state.rank_nodes)):
        if (is_drained := node in event.nodes) != (node in drained):
            why = f": {event.nodes[node]}" if event.nodes.get(node) else ""
            line = f"Slurm drains {node}{why}" if is_drained else f"Slurm drains {node} no more"
            faults.append(
                Fault.of_kind(NODE_DRAINED, event.wall, "slurm", line, node=node, cleared=not is_drained)
            )
    state.moves.drained = set(event.nodes)
    return faults


def tend_moves(state: AttemptState, now: float, wall: float) -> list[CoreAction]:
    """Note what nodes to leave, and begin the next move, or answer a wish."""
    moves, memory = state.moves, state.memory
    if memory is not None and state.settings.planned_moves:
        _take_faults(state, now, wall)
    if not moves.wishes or state.stop.asked:
        return []
    wish = moves.wishes[0]
    if memory is None:
        return refuse(state, wish, "this attempt has no recovery in memory: see the event recovery_unavailable")
    if wish.node in memory.left:
        moves.wishes.remove(wish)
        return []
    if memory.given_up:
        reason = "recovery in memory is not possible in this attempt any more: see its events"
        return refuse(state, wish, reason)
    if memory.active or memory.move is not None:
        return []
    if memory.held_in_vain:
        return refuse(state, wish, "the ranks held for a move, and a copy of their state was not whole in time")
    if wish.node not in state.rank_nodes:
        at = compress(set(state.rank_nodes))
        return refuse(state, wish, f"no rank is on {wish.node} (ranks are on {at})")
    if wish.tries >= _MOST_TRIES:
        return refuse(state, wish, f"faults interrupted it {wish.tries} times")
    return _begin(state, memory, wish, now)


def _take_faults(state: AttemptState, now: float, wall: float) -> None:
    """Note what the policy wants to leave; signs are kept, for faults that the run overcame are forgotten."""
    moves = state.moves
    moves.signs += [fault for fault in state.faults if fault.kind in KINDS and fault not in moves.signs]
    for leave in nodes_to_leave(moves.signs, set(state.rank_nodes), wall):
        wish = (leave.node, leave.reason)
        if wish not in moves.known and leave.node not in moves.nodes:
            moves.known.add(wish)
            moves.wishes.append(MoveWish(*wish, request=None, since=now))


def _begin(state: AttemptState, memory: MemoryState, wish: MoveWish, now: float) -> list[CoreAction]:
    """Begin a move, wait for its spare, or refuse it."""
    unfit = {fault.node for fault in state.faults if fault.role == "root" and not fault.cleared and fault.node}
    unfit |= memory.unfit | state.moves.drained
    plan, actions = plan_of_move(state, wish.node, unfit), list[CoreAction]()
    if plan.possible:
        if not has_fit_spares(state, plan, actions):  # it is checked, or another one is looked for
            return actions
        wish.tries += 1
        return [*actions, *hold_for_move(state, wish.node, plan, wish.reason, wish.request)]
    may_come = _may_come(state, memory, unfit)
    return [] if may_come and now <= wish.since + _SPARE_READY_S else refuse(state, wish, plan.reason)


def _may_come(state: AttemptState, memory: MemoryState, unfit: Collection[str]) -> bool:
    """Return whether there is a spare whose processes may get ready."""
    spares = set(memory.spares) - set(state.rank_nodes) - memory.left - state.overcome_nodes
    return bool(spares.difference(unfit))


def refuse(state: AttemptState, wish: MoveWish, reason: str) -> list[CoreAction]:
    """Answer that the ranks do not leave a node."""
    state.moves.wishes.remove(wish)
    return [Record(MoveRefused(attempt=state.number, off=wish.node, reason=reason, request=wish.request))]
