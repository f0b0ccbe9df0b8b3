"""Which nodes the ranks should leave before anything breaks: planned moves for advisory faults.

A move to a spare at a step's boundary (supervisor/in_memory/planned_moves.py) costs a fraction of a second, so
weaker signs are enough for it than for a restart; but it takes a spare, so one sign that may mean nothing is not.

Pure: what was noticed comes from the caller.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

from zslurm.aegis.fault_kinds import GPU_RAS_CORRECTABLE, GPU_THROTTLED, NODE_DRAINED, STRAGGLER
from zslurm.aegis.types import Fault
from zslurm.checkpoint_tools.quantities import counted

RISING = 3
"""Reports of one GPU's corrected memory errors after which they count as rising; a sensor reports a count again
once it is ten times as high."""

HOT_S = 600.0
"""Seconds for which a GPU must be slowed down for its temperature without a pause."""

KINDS = (GPU_RAS_CORRECTABLE, GPU_THROTTLED, NODE_DRAINED, STRAGGLER)
"""Kinds of faults that a planned move answers."""


@dataclass(frozen=True)
class Leave:
    """A node that the ranks should leave.

    Attributes:
        node: its name.
        reason: one line.
    """

    node: str
    reason: str


def nodes_to_leave(faults: Sequence[Fault], nodes: Collection[str], wall: float) -> list[Leave]:
    """Return which of the ranks' nodes they should leave, in the order in which the first sign was seen.

    Args:
        faults: of an attempt, oldest first; a straggler counts if it is a root (`straggler.act`).
        nodes: the ranks' nodes.
        wall: now (UNIX seconds).
    """
    reasons: dict[str, str] = {}
    for index, fault in enumerate(faults):
        if fault.node is None or fault.node not in nodes or fault.node in reasons or fault.cleared:
            continue
        if reason := _reason(fault, faults[: index + 1], faults[index + 1 :], wall):
            reasons[fault.node] = reason
    return [Leave(node, reason) for node, reason in reasons.items()]


def _reason(fault: Fault, until: Sequence[Fault], after: Sequence[Fault], wall: float) -> str:
    """Return why a fault is reason to leave its node; empty if it is none, or is over."""

    def is_same(other: Fault) -> bool:
        return (other.kind, other.node, other.gpu, other.rank) == (fault.kind, fault.node, fault.gpu, fault.rank)

    if any(other.cleared and is_same(other) for other in after):
        return ""
    if fault.kind == NODE_DRAINED or (fault.kind == STRAGGLER and fault.role == "root"):
        return fault.line
    # At its power limit a GPU under load is slowed down, too, and so are its peers.
    if fault.kind == GPU_THROTTLED and "too hot" in fault.line and wall - fault.time >= HOT_S:
        return f"GPU {fault.gpu} {fault.line}, for more than {HOT_S:g} s"
    if fault.kind == GPU_RAS_CORRECTABLE:
        times = sum(is_same(other) and not other.cleared for other in until)
        if times >= RISING:
            return f"corrected memory errors rise, {counted(times, 'report')} so far; the last: {fault.line}"
    return ""
