"""Which process is each rank of an attempt, on which node, and which nodes are there besides."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field

from zslurm.aegis.core.policy.in_memory import InMemory, Ranks
from zslurm.aegis.supervisor.in_memory.warm_pool import WarmPool
from zslurm.train.recovery.generation import member_name


@dataclass
class RankPlaces:
    """The ranks as of the newest generation that trains.

    Attributes:
        per_node: ranks of a node.
        nodes: the node of each rank.
        members: the process of each rank, NODE/SLOT; by default those that the attempt began with.
        spares: nodes without ranks that may be used.
        dead: nodes that died, and whose ranks are elsewhere now.
        left: nodes that ranks have left as planned.
    """

    per_node: int
    nodes: list[str]
    spares: tuple[str, ...] = ()
    members: list[str] = field(default_factory=list)
    dead: set[str] = field(default_factory=set)
    left: set[str] = field(default_factory=set)

    def __post_init__(self) -> None:
        """Name the members of the first generation."""
        if not self.members:
            self.members = [member_name(node, rank % self.per_node) for rank, node in enumerate(self.nodes)]

    @property
    def in_use(self) -> tuple[str, ...]:
        """The nodes that have ranks, in the order of these."""
        return tuple(dict.fromkeys(self.nodes))

    def on(self, nodes: Collection[str]) -> set[int]:
        """Return the ranks on some nodes."""
        return {rank for rank, node in enumerate(self.nodes) if node in nodes}

    def seen_with(
        self,
        warm: WarmPool,
        *,
        lost: Collection[int] = (),
        unusable: Collection[str] = (),
        step: int = 0,
        tries: int = 0,
        ended: Collection[int] = (),
        planned: Sequence[str] = (),
    ) -> Ranks:
        """Return what the policy decides on.

        Args:
            warm: the processes that wait.
            lost: ranks whose process is gone.
            unusable: nodes that must not be used, beside those that are known here.
            step: the last step that is finished.
            tries: recoveries since then.
            ended: ranks that hung, and were killed for that.
            planned: the members of a generation that is under way.
        """
        return Ranks(
            tuple(self.members),
            tuple(self.nodes),
            self.per_node,
            frozenset(lost),
            frozenset(self.dead | self.left).union(unusable),
            warm.waiting,
            warm.coming,
            step,
            tries,
            ended=frozenset(ended),
            planned=tuple(planned),
        )

    def take(self, plan: InMemory, dead: Collection[str]) -> None:
        """Note that the members of a plan are the ranks now, and what nodes died before."""
        self.dead |= set(dead)
        self.members, self.nodes = list(plan.members), list(plan.nodes)
        self.spares = tuple(node for node in self.spares if node not in self.nodes)
