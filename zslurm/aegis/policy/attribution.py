"""Who takes the blame for an attempt: a pure function of what was noticed and of the attempts before.

The earliest root does. Consequences, teardown and remarks never do; nor does what the run overcame: what logs and
sensors told of before all ranks finished another step. Clocks, sensors and logs do not report in order of time, so

- a machine that itself says it is broken outranks every error of a program;
- what explains the silent end of a rank (its own words, its host out of memory, a file system that stalled on
  several nodes) outranks that end;
- who only waits for somebody else, or is merely slow, takes the blame where there is nobody else.

Where faults of one kind name several nodes, none of them is suspected: it is the fabric or a service, or one of
them pulled the others down.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass, replace

from zslurm.aegis.fault_kinds import (
    EARLY_EXIT,
    NODE_DEAD,
    RANK_HANG,
    SLURM_CANCELLED,
    STORAGE_FAULT,
    STRAGGLER,
    UNKNOWN,
    FaultKind,
)
from zslurm.aegis.policy.history import active_exclusions, blamed_before
from zslurm.aegis.types import Fault, History, Situation
from zslurm.config.aegis import AegisSection

_ENDS_OF_RANKS = frozenset({"srun", "rank"})
"""Sources that tell of a rank's end: nothing goes on after it."""
_OF_SLURM = frozenset({"srun", "slurm"})
"""Sources that tell what Slurm did with the job or the step."""
_CLOCKS_S = 2.0
"""What the clocks of nodes and sensors may differ by."""


@dataclass(frozen=True)
class Blame:
    """What an attempt is blamed on, and what that asks for.

    Attributes:
        root: the fault; without node, GPU and NIC where it cannot be told which one it was; None: unknown.
        exclude: nodes that must not be used any more.
        test_gpu: (node, GPU or rank) to be tested.
    """

    root: Fault | None
    exclude: tuple[str, ...] = ()
    test_gpu: tuple[str, str] | None = None

    @property
    def kind(self) -> FaultKind:
        """The kind of the root."""
        return UNKNOWN if self.root is None else self.root.kind

    @property
    def what(self) -> str:
        """What happened and where, as the beginning of a line."""
        root = self.root
        if root is None:
            return self.kind.message
        place = [
            root.node,
            None if root.gpu is None else f"GPU {root.gpu}",
            None if root.nic is None else f"NIC {root.nic}",
            None if root.rank is None else f"rank {root.rank}",
            f"after step {root.step}" if root.step is not None and root.step > 0 else None,
        ]
        where = ", ".join(part for part in place if part)
        return f"{where}: {self.kind.message}" if where else self.kind.message


def roots_of(situation: Situation, settings: AegisSection) -> list[Fault]:
    """The faults of an attempt that may take the blame, by time."""
    by_time = sorted(situation.faults, key=lambda fault: (fault.time, fault.rank is None, fault.rank or 0))
    ends = _ends(situation.faults)
    return [fault for fault in by_time if _may_be_root(fault, ends, situation, settings)]


def without_overcome(situation: Situation, settings: AegisSection) -> list[Fault]:
    """The faults of a running attempt without those that it overcame for good, and what took these back.

    None of them can take the blame any more, and in weeks they become many.
    """
    ends = _ends(situation.faults)

    def is_open(fault: Fault) -> bool:
        if fault.kind == STRAGGLER or fault.source in _OF_SLURM:
            return True
        end = _taken_back(fault, ends)
        lasts = end is None and _stays(fault)
        return not fault.cleared and (lasts or not _overcome(fault, end, situation, settings))

    left = {fault for fault in situation.faults if is_open(fault)}
    left |= {end for fault in left if (end := _taken_back(fault, ends)) is not None}
    return [fault for fault in situation.faults if fault in left]


def _ends(faults: Sequence[Fault]) -> list[Fault]:
    """What says that a fault is over, by time."""
    return sorted((fault for fault in faults if fault.cleared), key=lambda end: end.time)


def _may_be_root(fault: Fault, ends: Sequence[Fault], situation: Situation, settings: AegisSection) -> bool:
    running = situation.outcome is None
    if fault.cleared:
        return False
    if fault.kind == STRAGGLER:
        return settings.straggler.act and fault.node in situation.nodes
    # While it runs, a collective operation that timed out is a reason to end the attempt, whoever it waited for.
    if fault.role != "root" and not (running and fault.kind.waits and fault.role == "cascade"):
        return False
    elsewhere = fault.node is not None and fault.node not in situation.nodes
    if situation.nodes and elsewhere and fault.kind.exclude_after is not None:
        return False  # on a spare, perhaps
    if (end := _taken_back(fault, ends)) is not None:
        return not running and not _overcome(fault, end, situation, settings)
    return _stays(fault) or not _overcome(fault, None, situation, settings)


def _stays(fault: Fault) -> bool:
    """True for a state that lasts until something takes it back, though the run goes on."""
    return fault.kind.while_running == "give up" or fault.kind.lasting or fault.source in _ENDS_OF_RANKS


def _taken_back(fault: Fault, ends: Sequence[Fault]) -> Fault | None:
    """The first of `ends`, by time, that says that a fault is over: of its kind and place, or its network."""

    def over(end: Fault) -> bool:
        same = end.kind == fault.kind or (end.kind.of_network and fault.kind.of_network)
        places = ((end.node, fault.node), (end.nic, fault.nic), (end.gpu, fault.gpu), (end.rank, fault.rank))
        agree = all(one == other for one, other in places if one is not None and other is not None)
        return same and agree

    later = range(bisect_left(ends, fault.time, key=lambda end: end.time), len(ends))
    return next((ends[i] for i in later if over(ends[i])), None)


def _overcome(fault: Fault, end: Fault | None, situation: Situation, settings: AegisSection) -> bool:
    """True where the run went on after a fault, so that it cannot be why it ended later."""
    if situation.progressed_at is not None:
        return situation.progressed_at > fault.time + _CLOCKS_S
    return end is not None and situation.now - end.time > settings.tolerate_s


def blame(roots: Sequence[Fault], situation: Situation, history: History, settings: AegisSection) -> Blame:
    """Choose the one that takes the blame, and say whom it costs.

    Args:
        roots: faults that may take it, by time (`roots_of`).
        situation: the attempt.
        history: the attempts before it.
        settings: section `aegis`.
    """
    roots = _believable(roots, situation)
    known = active_exclusions(history, situation.now, settings)
    certain = [fault for fault in roots if fault.kind.certain]
    leading = [fault for fault in roots if fault.kind.then == "requeue"] + certain
    if leading:
        nodes = dict.fromkeys(fault.node for fault in certain if fault.node is not None)
        exclude = tuple(node for node in nodes if node not in known)
        return Blame(leading[0], exclude)
    root = _first(roots)
    if root is None:
        return Blame(None)
    if root.kind.then == "test":
        return Blame(root, test_gpu=_to_test(root, situation, history, settings))
    if root.kind.exclude_after is None or root.node is None:
        return Blame(root)
    if len({fault.node for fault in roots if fault.kind == root.kind and fault.node is not None}) > 1:
        return Blame(replace(root, node=None, gpu=None, nic=None))
    if root.node in known or not _proven(root, root.node, situation, history, settings):
        return Blame(root)
    return Blame(root, (root.node,))


def _believable(roots: Sequence[Fault], situation: Situation) -> list[Fault]:
    """Without dead nodes where all of several are reported dead: then it is the reporter who is cut off."""
    dead = {fault.node for fault in roots if fault.kind == NODE_DEAD}
    cut_off = len(situation.nodes) > 1 and dead >= set(situation.nodes)
    return [fault for fault in roots if not (cut_off and fault.kind == NODE_DEAD)]


def _first(roots: Sequence[Fault]) -> Fault | None:
    """The earliest of those that are neither slow nor waiting, or what explains it; else the earliest of all."""
    if not roots:
        return None
    active = [fault for fault in roots if not fault.kind.waits and fault.kind != STRAGGLER]
    slow = [fault for fault in roots if fault.kind == STRAGGLER]
    root = next(iter(active or [fault for fault in roots if fault not in slow] or slow))
    if not root.kind.unexplained:
        return root
    return next((fault for fault in active if _explains(fault, root)), root)


def _explains(fault: Fault, end: Fault) -> bool:
    """True where a fault says why a rank ended, though it was noticed later."""
    if fault.kind.unexplained:
        return False
    if fault.kind == SLURM_CANCELLED and fault.source in _OF_SLURM:  # every rank of the step
        return True
    if fault.kind == EARLY_EXIT and end.kind == RANK_HANG:  # all who are left wait for the one that has gone
        return True
    if fault.rank is not None:
        return fault.rank == end.rank
    if fault.kind == STORAGE_FAULT and fault.node is None:
        return end.kind == RANK_HANG
    return fault.kind.explains_rank_ends and (fault.node is None or fault.node == end.node)


def _proven(root: Fault, node: str, situation: Situation, history: History, settings: AegisSection) -> bool:
    """True where the root speaks against its node often enough."""
    ends = _ends(situation.faults)
    lasted = situation.now - root.time >= settings.tolerate_s and _taken_back(root, ends) is None
    if root.kind.exclude_after == 1 or (root.kind.lasting and lasted):
        return True
    times = root.kind.exclude_after or 0
    before = [
        fault
        for fault in blamed_before(history, node, situation.now - settings.exclude_for_s)
        if 0 < (fault.kind.exclude_after or 0) <= times
    ]
    if root.step is not None and {fault.step for fault in before} == {root.step}:
        return False  # always after the same step: a program that fails there, on whatever node
    return len(before) + 1 >= times


def _to_test(
    root: Fault, situation: Situation, history: History, settings: AegisSection
) -> tuple[str, str] | None:
    """The GPU that must be tested, because NaN came first from it again and again."""
    if root.node is None or (root.gpu is None and root.rank is None):
        return None
    before = [
        fault
        for fault in blamed_before(history, root.node, situation.now - settings.exclude_for_s)
        if (fault.kind, fault.gpu, fault.rank) == (root.kind, root.gpu, root.rank)
    ]
    if len(before) + 1 < settings.nan_repeats:
        return None
    return root.node, str(root.rank) if root.gpu is None else root.gpu
