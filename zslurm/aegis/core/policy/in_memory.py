"""Whether a fault is recovered from in memory: survivors stay alive, other processes take the lost ranks' places.

A planned move off a node that is alive is made in the same way, at a step's boundary.

The first rung of the ladder, with `aegis.recovery: memory`. What it cannot do is left to the next one: every rank
is started again, from a copy on its node or from the newest checkpoint. The reason is an event then.

Pure: who was lost, who waits and what was noticed come from the caller.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field

from zslurm.aegis.fault_kinds import GPU_MEMORY_FAULT, RANK_HANG, FaultKind
from zslurm.aegis.types import Fault
from zslurm.checkpoint_tools.quantities import counted
from zslurm.train.recovery.generation import NEW, buddy_of, node_of


@dataclass(frozen=True)
class Ranks:
    """The ranks of an attempt as they are now.

    Attributes:
        members: the process of each rank, NODE/SLOT.
        nodes: the node of each rank.
        per_node: ranks of a node.
        lost: ranks whose process is gone, or whose node is dead.
        dead: nodes that must not be used: dead ones among these, and those that the ranks leave or have left.
        warm: processes that wait to take a rank's place, by node.
        coming: how many of them are being started, by node.
        step: the last step that is finished in this attempt; -1 before the first.
        tries: recoveries since that step was finished.
        ended: ranks that hung, and that were killed alone for that (policy/hanging.py).
        planned: the process of each rank in a generation that is still regrouping; empty if none is. One that
            has taken a rank's place stays that rank.
    """

    members: tuple[str, ...]
    nodes: tuple[str, ...]
    per_node: int
    lost: frozenset[int]
    dead: frozenset[str] = frozenset()
    warm: Mapping[str, Sequence[str]] = field(default_factory=dict)
    coming: Mapping[str, int] = field(default_factory=dict)
    step: int = 0
    tries: int = 0
    ended: frozenset[int] = frozenset()
    planned: tuple[str, ...] = ()


@dataclass(frozen=True)
class InMemory:
    """What to do about lost ranks.

    Attributes:
        members: of the next generation, by rank; empty if the recovery is not possible.
        nodes: of them, by rank.
        former: the rank that each of them had, or NEW; empty if the number of ranks stays.
        reason: why it is not possible; empty if it is, or may be later.
        start: processes to start, by node: there are too few, and the ranks that survived wait for them.
        waits: whether processes that are being started, or are to be, are waited for.
    """

    members: tuple[str, ...] = ()
    nodes: tuple[str, ...] = ()
    former: tuple[int, ...] = ()
    reason: str = ""
    start: Mapping[str, int] = field(default_factory=dict)
    waits: bool = False

    @property
    def possible(self) -> bool:
        """Whether the survivors may continue."""
        return bool(self.members)


def plan_in_memory(
    ranks: Ranks,
    faults: Collection[Fault],
    *,
    most_tries: int,
    why_not_fewer: Callable[[int], str] = lambda nodes: "aegis.min_nodes is not set",
) -> InMemory:
    """Return who takes the places of lost ranks, or why that is not possible.

    Args:
        ranks: as they are.
        faults: what was noticed since the last recovery.
        most_tries: recoveries without a finished step between them, after which the ranks are started again.
        why_not_fewer: returns why the ranks must not continue on that number of nodes, if a dead node has no
            spare; empty if they may.
    """
    reason = _blocking_reason(ranks, faults, most_tries)
    if reason:
        return InMemory(reason=reason)
    members, nodes = list(ranks.members), list(ranks.nodes)
    free = {node: list(waiting) for node, waiting in ranks.warm.items() if node not in ranks.dead}
    start, waits = {}, False
    left_out: set[int] = set()
    kept = _kept(ranks, free)
    for node in dict.fromkeys(ranks.nodes[rank] for rank in sorted(ranks.lost)):
        lost = [rank for rank in sorted(ranks.lost) if ranks.nodes[rank] == node]
        for rank in kept.keys() & set(lost):
            members[rank], nodes[rank] = kept[rank], node_of(kept[rank])
        target: str | None = node
        if node in ranks.dead:
            begun = next((nodes[rank] for rank in lost if rank in kept), None)
            target = begun or _spare_for(len(lost), free, ranks)
        lost = [rank for rank in lost if rank not in kept]
        if target is None:
            fewer = len(set(ranks.nodes) - ranks.dead)
            if why := why_not_fewer(fewer):
                has = counted(len(lost), "warm process", "warm processes")
                return InMemory(reason=f"no spare node has {has}, and fewer nodes are not used: {why}")
            left_out |= set(lost)
            continue
        if (missing := len(lost) - len(free.get(target, ()))) > 0:
            waits = True
            if (more := missing - ranks.coming.get(target, 0)) > 0:
                start[target] = more
            continue
        for rank in lost:
            members[rank], nodes[rank] = free[target].pop(0), target
    if waits:
        return InMemory(start=start, waits=True)
    if left_out and ranks.lost != left_out:
        # A process that joins and fewer ranks at once: the copies are of another number of ranks than it knows.
        return InMemory(reason="ranks were lost on several nodes, and not all of them can be replaced")
    if not left_out:
        return InMemory(tuple(members), tuple(nodes))
    former = tuple(rank for rank in range(len(members)) if rank not in left_out)
    return InMemory(tuple(members[rank] for rank in former), tuple(nodes[rank] for rank in former), former)


def plan_move(ranks: Ranks, node: str, *, unfit: Collection[str] = ()) -> InMemory:
    """Return who continues as the ranks of a node that they are to leave, or why that is not possible now.

    Args:
        ranks: as they are; the node's are alive, so it does not matter who keeps their copies.
        node: which they leave.
        unfit: nodes that must not take its place.
    """
    moved = [rank for rank, at in enumerate(ranks.nodes) if at == node]
    if not moved:
        return InMemory(reason=f"no rank is on {node}")
    if len(moved) == len(ranks.members):
        return InMemory(reason=f"every rank is on {node}, so no other node keeps their state")
    free = {name: list(warm) for name, warm in ranks.warm.items() if name not in {*ranks.dead, *unfit, node}}
    target = _spare_for(len(moved), free, ranks)
    if target is None or len(free.get(target, ())) < len(moved):  # it may get them yet
        return InMemory(reason=f"no spare node has {counted(len(moved), 'warm process', 'warm processes')}")
    members, nodes = list(ranks.members), list(ranks.nodes)
    for rank in moved:
        members[rank], nodes[rank] = free[target].pop(0), target
    return InMemory(tuple(members), tuple(nodes))


def plan_growth(ranks: Ranks, nodes: Sequence[str]) -> InMemory:
    """Return the ranks with those of some nodes after them, on which enough processes wait."""
    joining = [member for node in nodes for member in ranks.warm[node][: ranks.per_node]]
    members = (*ranks.members, *joining)
    at = (*ranks.nodes, *map(node_of, joining))
    return InMemory(members, at, (*range(len(ranks.members)), *[NEW] * len(joining)))


def _kept(ranks: Ranks, free: dict[str, list[str]]) -> dict[int, str]:
    """Take the processes that are about to be lost ranks already out of those that are free, by rank."""
    kept = {}
    for rank, member in enumerate(ranks.planned):
        waiting = free.get(node_of(member), [])
        if rank in ranks.lost and member in waiting:
            waiting.remove(member)
            kept[rank] = member
    return kept


def _blocking_reason(ranks: Ranks, faults: Collection[Fault], most_tries: int) -> str:
    size = len(ranks.members)

    def elsewhere(fault: Fault) -> bool:
        """Return whether it is of a node without ranks, a spare or one that they have left."""
        return fault.node is not None and fault.node not in ranks.nodes and fault.rule.exclude_after is not None

    def is_left(fault: Fault) -> bool:
        """Return whether it is of a node that the ranks leave: then it matters no more."""
        return fault.node in ranks.dead and fault.rule.exclude_after is not None

    over = [fault for fault in faults if fault.kind == RANK_HANG and fault.rank in ranks.ended]
    roots = [fault for fault in faults if fault.role == "root" and fault not in over]
    remaining = [fault for fault in roots if not (elsewhere(fault) or is_left(fault))]
    if other_fault := next((fault for fault in remaining if fault.rule.in_memory != "rank"), None):
        return why_not_in_memory(other_fault)
    if len(ranks.lost) == size:
        return "no rank survived"
    if ranks.step < 0:
        return "no step was finished yet, so there is no copy to go back to"
    if ranks.tries >= most_tries:
        return f"{counted(ranks.tries, 'recovery', 'recoveries')} in memory led to no new step"
    for rank in sorted(ranks.lost):
        buddy = buddy_of(rank, size, ranks.per_node)
        if buddy in ranks.lost:
            return f"rank {rank} is lost together with rank {buddy}, which kept the copy of its state"
    return ""


def why_not_in_memory(fault: Fault) -> str:
    """Return why the ranks cannot continue in memory after a fault that ends their attempt."""
    return f"{fault.rule.message}: {_OF_KIND.get(fault.kind, 'every rank must be started again')}"


_OF_KIND: Mapping[FaultKind, str] = {
    RANK_HANG: "it may hang inside a device call, which nothing can interrupt",
    GPU_MEMORY_FAULT: "the device context is corrupt, perhaps that of its neighbours too",
}
"""Why kinds of faults go down a rung, if that is not plain from the kind."""


def _spare_for(ranks: int, free: Mapping[str, Sequence[str]], now: Ranks) -> str | None:
    """Return a node without ranks that has enough warm processes, or at least gets them."""
    warm_now = {node: len(warm) for node, warm in free.items()}
    soon = {node: warm_now.get(node, 0) + coming for node, coming in now.coming.items()}
    unusable = {*now.nodes, *now.dead}
    return next(
        (
            node
            for has in (warm_now, soon)
            for node, count in has.items()
            if node not in unusable and count >= ranks
        ),
        None,
    )
