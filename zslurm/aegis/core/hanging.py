"""Ranks that hang: before anything is ended, who they are by all witnesses, and whether they are replaced alone.

    a hang -> ExamineHang -> who hangs (policy/hanging.py) -> can they be replaced? -> DumpStacks, KillRanks
           -> recovery in memory takes the killed rank up like any other lost one

Without recovery in memory the same witnesses are asked, for the record, and every rank is ended.
"""

from __future__ import annotations

from collections.abc import Collection

from zslurm.aegis.core import memory
from zslurm.aegis.core.attempt import AttemptState
from zslurm.aegis.core.messages import (
    CoreAction,
    DumpStacks,
    ExamineHang,
    GiveUp,
    HangExamined,
    KillRanks,
    RanksKilled,
    Record,
    Tick,
)
from zslurm.aegis.core.policy.hanging import Witnesses, who_hangs
from zslurm.aegis.fault_kinds import HANG_HEARTBEAT, RANK_HANG, RCCL_TIMEOUT
from zslurm.run.events import HangingRanksEnded

_WAITS = (RANK_HANG, RCCL_TIMEOUT, HANG_HEARTBEAT)
"""Kinds of faults after which the witnesses may show who was waited for."""
_REPORTED_S = 20.0
"""Seconds in which srun must have reported the end of a rank that was killed."""


def give_up(state: AttemptState, given_up: GiveUp, event: Tick) -> list[CoreAction]:
    """Return how an attempt is ended, or what may make that unnecessary: ranks that hang are replaced alone."""
    hang, root = state.hang, given_up.root
    # Nothing is recovered in memory once the ranks were asked to save and stop.
    recovers = state.memory is not None and not state.memory.given_up
    may_replace = recovers and root is not None and root.kind == RANK_HANG and not state.stop.asked
    hang.pending, hang.replaces = given_up, may_replace
    if may_replace and hang.until is not None:
        if event.now < hang.until:
            return []
        reason = "a rank that hung was killed, and Slurm did not report its end"
        return [*memory.give_up(state, reason, hang.killed), given_up]
    if not hang.examined and any(fault.kind in _WAITS for fault in state.faults):
        hang.examined = True
        return [ExamineHang()]
    return _choose(state) if may_replace else [given_up]


def take_examination(state: AttemptState, event: HangExamined) -> list[CoreAction]:
    """Take what the witnesses show, whose faults are noted already, and continue with what they were asked for."""
    state.hang.culprits, state.hang.behind = event.culprits, event.behind
    return _choose(state) if state.hang.replaces else _end(state)


def take_killed(state: AttemptState, event: RanksKilled) -> list[CoreAction]:
    """Wait for srun to report ranks that were killed; end the attempt if they could not be."""
    if event.reason:
        return _refuse(state, event.ranks, event.reason)
    if state.memory is not None:
        state.memory.ended |= set(event.ranks)
    state.hang.killed, state.hang.until = frozenset(event.ranks), event.now + _REPORTED_S
    root = state.hang.pending.root if state.hang.pending is not None else None
    nodes = [state.rank_nodes[rank] for rank in event.ranks]
    ended = HangingRanksEnded(
        attempt=state.number, ranks=list(event.ranks), nodes=nodes, reason=root.line if root is not None else ""
    )
    return [Record(ended)]


def _choose(state: AttemptState) -> list[CoreAction]:
    hanging = who_hangs(_witnesses(state))
    ranks = sorted(hanging.ranks)
    if reason := hanging.reason or memory.why_not(state, ranks):
        return _refuse(state, ranks, reason)
    return [DumpStacks(), KillRanks(tuple(ranks))]


def _refuse(state: AttemptState, ranks: Collection[int], reason: str) -> list[CoreAction]:
    return [*memory.give_up(state, f"a rank hangs: {reason}", ranks), *_end(state)]


def _end(state: AttemptState) -> list[CoreAction]:
    return [state.hang.pending] if state.hang.pending is not None else []


def _witnesses(state: AttemptState) -> Witnesses:
    faults = [fault for fault in state.faults if fault.kind == RANK_HANG]
    by_progress = [fault for fault in faults if fault.source == "progress"]
    return Witnesses(
        progress=frozenset(fault.rank for fault in by_progress if fault.rank is not None),
        unnamed=any(fault.rank is None for fault in by_progress),
        recorded={rank: culprits.how for culprits in state.hang.culprits for rank in culprits.ranks},
        behind=state.hang.behind,
    )
