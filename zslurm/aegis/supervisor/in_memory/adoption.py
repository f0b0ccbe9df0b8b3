"""A supervisor takes over the recovery in memory of an attempt that another one, which is gone, has started.

The store server has outlived that supervisor, and knows the generations and the warm processes (store_server.py);
the run directory has the steps of the warm processes, and the events what was recorded:

    store.json -> StoreClient.adopt -> generations    \
    warm-*.json -> WarmPool.adopt                       } Resumed -> MemoryRecovery.resume
    events.jsonl -> what was recorded of the attempt  /

A generation that the other supervisor has published, and whose end it did not record, is waited for, or recorded
now. Where the server does not answer, the reason is returned, and faults of the attempt restart the ranks.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from zslurm.aegis.core.policy.in_memory import InMemory
from zslurm.aegis.fault_kinds import NODE_DEAD
from zslurm.aegis.supervisor.in_memory.boundary_moves import Move
from zslurm.aegis.supervisor.in_memory.memory_recovery import MemoryRecovery
from zslurm.aegis.supervisor.in_memory.rank_places import RankPlaces
from zslurm.aegis.supervisor.in_memory.resumed import Resumed
from zslurm.aegis.supervisor.in_memory.warm_pool import WarmPool
from zslurm.aegis.supervisor.job import Job
from zslurm.core.errors import ZslurmError
from zslurm.job.in_memory.store_client import StoreClient
from zslurm.run.events import (
    FaultDetected,
    HangingRanksEnded,
    MovePlanned,
    RanksMoved,
    RecoveredInMemory,
    RecoveryFailed,
    RecoveryUnavailable,
)
from zslurm.run.events.event import Event
from zslurm.run.metrics.tail import newest_rows
from zslurm.run.run_dir import AttemptDir
from zslurm.train.recovery.generation import Generation, member_name, node_of

_ANSWERS_S = 10.0
"""Seconds that the server gets: it may have been started a moment ago, and import torch."""
_AGAIN_S = 0.1

KINDS: tuple[type[Event], ...] = (
    FaultDetected, HangingRanksEnded, MovePlanned, RanksMoved, RecoveredInMemory, RecoveryFailed,
    RecoveryUnavailable,
)  # fmt: skip
"""The events that matter here."""


def adopt_memory(
    job: Job,
    attempt: AttemptDir,
    nodes: Sequence[str],
    events: Sequence[Event],
    pool: WarmPool,
    usable: Sequence[str],
    why_not_fewer: Callable[[int], str],
) -> MemoryRecovery:
    """Return the recovery of an attempt, as another supervisor has left it.

    Args:
        job: the start of the job.
        attempt: the attempt.
        nodes: on which it was started, in the order of its ranks.
        events: of the run so far.
        pool: for its warm processes; empty.
        usable: nodes of the job that may be used.
        why_not_fewer: as of MemoryRecovery.

    Raises:
        ZslurmError: its store server cannot be reached.
    """
    ours = [event for event in events if event.row.get("attempt") == attempt.number]
    store, report = _connect(attempt)
    per_node = job.spec.ranks_per_node
    first = [member_name(node, slot) for node in nodes for slot in range(per_node)]
    newest = newest_rows(job.run.metrics).step
    trained = int(newest["step"]) if newest.get("attempt") == attempt.number else -1
    found = replace(resumed(report, first, ours), trained=trained)
    taken = {*found.members, *(found.pending.members if found.pending is not None else ())}
    pool.adopt()
    for node in found.left:
        pool.leave(node)
    for member in report["warm"]:
        pool.add(member)
    pool.take(taken)
    in_use = {node_of(member) for member in taken}
    spares = tuple(node for node in usable if node not in in_use and node not in found.left)
    places = RankPlaces(per_node, [node_of(member) for member in found.members], spares)
    memory = MemoryRecovery(job, attempt, store, pool, places, why_not_fewer)
    memory.resume(found)
    return memory


def _connect(attempt: AttemptDir) -> tuple[StoreClient, Mapping[str, Any]]:
    """Return a connection to the store server, and what it knows.

    Raises:
        ZslurmError: it does not answer.
    """
    deadline = time.monotonic() + _ANSWERS_S
    while True:
        try:
            store = StoreClient.adopt(attempt)
            break
        except FileNotFoundError as error:  # it may have been started just now
            if time.monotonic() > deadline or attempt.step_exit.exists():
                raise ZslurmError(str(error.strerror)) from error
        except OSError as error:
            raise ZslurmError(f"its store server does not answer: {error.strerror or error}") from error
        time.sleep(_AGAIN_S)
    report = store.taken_over(_ANSWERS_S)
    if report is None:
        raise ZslurmError(f"its store server did not answer within {_ANSWERS_S:g} s")
    return store, report


def resumed(report: Mapping[str, Any], first: Sequence[str], events: Sequence[Event]) -> Resumed:
    """Return where the attempt is.

    Args:
        report: of the store server.
        first: the members at the start of the attempt.
        events: of the attempt.
    """
    newest, before, planned = (_generation(report.get(name)) for name in ("newest", "before", "move"))
    recoveries = [event for event in events if isinstance(event, RecoveredInMemory)]
    moves = [event for event in events if isinstance(event, RanksMoved)]
    recorded = {event.generation for event in recoveries} | {event.generation for event in moves}
    pending = None if newest is None or newest.number in recorded else newest
    now = before if pending is not None else newest
    members = tuple(first) if now is None else now.members
    at = [node_of(member) for member in members]
    faults = [event for event in events if isinstance(event, FaultDetected)]
    died = {event.node for event in faults if event.kind == NODE_DEAD and event.node}
    left = {event.off for event in moves}
    number = 0 if newest is None else newest.number
    after = max((event.time for event in (*recoveries, *moves)), default=0.0)
    hung = [event for event in events if isinstance(event, HangingRanksEnded) and event.time >= after]
    asked = [event for event in events if isinstance(event, MovePlanned)]
    moving = pending if pending is not None else planned
    return Resumed(
        members,
        number,
        step=recoveries[-1].step if recoveries else -1,
        dead=frozenset(died.difference(at)),
        left=frozenset(left),
        ended=frozenset(rank for event in hung for rank in event.ranks),
        died=frozenset(died),
        given_up=any(isinstance(event, RecoveryFailed) for event in events),
        pending=pending,
        outcome=report.get("outcome") if pending is not None else None,
        move=None if moving is None else _move(moving, at, left, asked),
        in_vain=int(report.get("unmoved") or 0) == number + 1,
    )


def _generation(fields: object) -> Generation | None:
    return Generation.of(fields) if isinstance(fields, dict) else None


def _move(
    generation: Generation, at: Sequence[str], left: set[str], planned: Sequence[MovePlanned]
) -> Move | None:
    """Return the planned move that a generation makes; None where it makes none."""
    off = next((node for node in generation.left if node not in left), None)
    asked = [event for event in planned if event.off == off]
    if off is None or not asked:
        return None
    nodes = tuple(node_of(member) for member in generation.members)
    ranks = tuple(rank for rank, node in enumerate(at) if node == off)
    plan = InMemory(generation.members, nodes)
    return Move(off, plan, ranks, generation.number, asked[-1].reason, asked[-1].request)
