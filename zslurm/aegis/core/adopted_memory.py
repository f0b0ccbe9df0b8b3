"""A supervisor takes over the recovery in memory of an attempt that another one, which is gone, has started.

The store server has outlived that supervisor, and knows the generations and the warm processes (store_server.py);
the run's events have what was recorded of the attempt. A generation that the other supervisor has published, and
whose end it did not record, is waited for, or recorded now.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from zslurm.aegis.core.attempt import MemoryState, Move
from zslurm.aegis.core.policy.in_memory import InMemory
from zslurm.aegis.fault_kinds import NODE_DEAD
from zslurm.run.events import (
    FaultDetected,
    HangingRanksEnded,
    MovePlanned,
    RanksExpelled,
    RanksJoined,
    RanksMoved,
    RecoveredInMemory,
    RecoveryFailed,
    RecoveryUnavailable,
)
from zslurm.run.events.event import Event
from zslurm.train.recovery.generation import Generation, node_of

KINDS: tuple[type[Event], ...] = (
    FaultDetected, HangingRanksEnded, MovePlanned, RanksExpelled, RanksJoined, RanksMoved, RecoveredInMemory,
    RecoveryFailed, RecoveryUnavailable,
)  # fmt: skip
"""The events that matter here."""


@dataclass(frozen=True)
class FoundMemory:
    """The state of the recovery in memory of an attempt.

    Attributes:
        members: by rank, before `pending`.
        number: of the newest generation.
        step: to which the last recovery went back; -1 if there was none.
        left: nodes that ranks have left.
        expelled: nodes that they leave for a fault, with what it is.
        ended: ranks that hung, and were killed alone, since the last recovery.
        died: nodes that have died in this attempt.
        given_up: nothing is recovered in memory in this attempt any more.
        pending: the newest generation if its end is not recorded yet.
        outcome: of `pending`, if the store server knows it.
        move: the planned move that `pending` is, or that waits for a boundary.
        in_vain: the ranks have held in vain for the next generation.
    """

    members: tuple[str, ...]
    number: int = 0
    step: int = -1
    left: frozenset[str] = frozenset()
    expelled: Mapping[str, str] = field(default_factory=dict)
    ended: frozenset[int] = frozenset()
    died: frozenset[str] = frozenset()
    given_up: bool = False
    pending: Generation | None = None
    outcome: Mapping[str, Any] | None = None
    move: Move | None = None
    in_vain: bool = False

    @property
    def rank_nodes(self) -> list[str]:
        """The node of each rank."""
        return [node_of(member) for member in self.members]

    def state(
        self,
        per_node: int,
        usable: Sequence[str],
        started: Mapping[str, int],
        warm: Sequence[str],
        trained: int,
    ) -> MemoryState:
        """Return the state from which the recovery in memory continues.

        Args:
            per_node: ranks of a node.
            usable: nodes of the job that may be used.
            started: warm processes that were started, by node.
            warm: those of them that are ready, or have been.
            trained: the last step that is known to be finished; -1 if none is.
        """
        taken = {*self.members, *(self.pending.members if self.pending is not None else ())}
        in_use = {node_of(member) for member in taken}
        spares = tuple(node for node in usable if node not in in_use and node not in self.left)
        memory = MemoryState(per_node, list(self.members), spares)
        memory.coming.update(started)
        for node in self.left:
            memory.leave(node)
        memory.expelled, memory.told = dict(self.expelled), {*self.expelled, *self.left}
        for member in warm:
            memory.add_warm(member)
        memory.take_warm(taken)
        memory.number, memory.ended, memory.given_up = self.number, set(self.ended), self.given_up
        memory.move, memory.held_in_vain = self.move, self.in_vain
        memory.recovered_at, memory.trained = self.step, trained
        memory.tries = 1 if self.step >= 0 else 0
        return memory


def found_memory(report: Mapping[str, Any], first: Sequence[str], events: Sequence[Event]) -> FoundMemory:
    """Return the state of the recovery in memory of an attempt.

    Args:
        report: of the store server.
        first: the members at the start of the attempt.
        events: of the attempt.
    """
    newest, before, planned = (_generation(report.get(name)) for name in ("newest", "before", "move"))
    recoveries = [event for event in events if isinstance(event, RecoveredInMemory)]
    moves = [event for event in events if isinstance(event, RanksMoved)]
    joins = [event for event in events if isinstance(event, RanksJoined)]
    done: list[RecoveredInMemory | RanksMoved | RanksJoined] = [*recoveries, *moves, *joins]
    recorded = {event.generation for event in done}
    pending = None if newest is None or newest.number in recorded else newest
    current = before if pending is not None else newest
    members = tuple(first) if current is None else current.members
    at = [node_of(member) for member in members]
    faults = [event for event in events if isinstance(event, FaultDetected)]
    died = {event.node for event in faults if event.kind == NODE_DEAD and event.node}
    expelled = {
        node: event.reason or ""
        for event in events
        if isinstance(event, RanksExpelled)
        for node in event.nodes or ()
    }
    nodes_left = {event.off for event in moves} | (expelled.keys() - set(at))
    number = 0 if newest is None else newest.number
    after = max((event.time for event in done), default=0.0)
    hung = [event for event in events if isinstance(event, HangingRanksEnded) and event.time >= after]
    asked = [event for event in events if isinstance(event, MovePlanned)]
    moving = pending if pending is not None else planned
    return FoundMemory(
        members,
        number,
        step=recoveries[-1].step if recoveries else -1,
        left=frozenset(nodes_left),
        expelled={node: why for node, why in expelled.items() if node in at},
        ended=frozenset(rank for event in hung for rank in event.ranks),
        died=frozenset(died),
        given_up=any(isinstance(event, RecoveryFailed) for event in events),
        pending=pending,
        outcome=report.get("outcome") if pending is not None else None,
        move=None if moving is None else _move(moving, at, nodes_left | expelled.keys(), asked),
        in_vain=int(report.get("unmoved") or 0) == number + 1,
    )


def _generation(fields: object) -> Generation | None:
    return Generation.of(fields) if isinstance(fields, dict) else None


def _move(
    generation: Generation, at: Sequence[str], left: set[str], planned: Sequence[MovePlanned]
) -> Move | None:
    """Return the planned move that a generation makes; None if it makes none."""
    if generation.grows:
        at_nodes = tuple(map(node_of, generation.members))
        plan = InMemory(generation.members, at_nodes, generation.former)
        return Move("", plan, (), generation.number, "a helper job has brought its nodes")
    off = next((node for node in generation.left if node not in left), None)
    asked = [event for event in planned if event.off == off]
    if off is None or not asked:
        return None
    nodes = tuple(node_of(member) for member in generation.members)
    ranks = tuple(rank for rank, node in enumerate(at) if node == off)
    plan = InMemory(generation.members, nodes)
    return Move(off, plan, ranks, generation.number, asked[-1].reason, asked[-1].request)
