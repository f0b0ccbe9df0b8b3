"""The same map on every node? Nodes that differ from the others, and in what.

Two things are compared. The place: rail, local ranks, and the PCI addresses. It decides which plane of
switches a rank's traffic takes, and on a rails-only network a node whose rank 3 sends on plane 4 reaches nobody.
And the name of the NIC: NCCL_IB_HCA is one list for all nodes and filters by name, so a node on which a rail's
card has another name loses that rail, or uses a card that is none. Speed of the links is compared as well.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import Literal, TypeVar

from zslurm.checkpoint_tools.quantities import counted
from zslurm.cluster.rails.types import Rail, RailMap
from zslurm.slurm.hostlist import compress

Aspect = Literal["rails", "place", "name", "rate"]


@dataclass(frozen=True)
class Difference:
    """Nodes that agree with each other and differ from the most.

    Attributes:
        nodes: their names.
        others: how many nodes they are compared with.
        aspect: in what they differ.
        rail: where; None where the number of rails differs.
    """

    nodes: tuple[str, ...]
    others: int
    aspect: Aspect
    rail: int | None
    message: str

    def __str__(self) -> str:
        one = len(self.nodes) == 1
        which = compress(self.nodes) if one else f"{compress(self.nodes)} (these {len(self.nodes)})"
        return f"{which} {'differs' if one else 'differ'} from the other {self.others}: {self.message}"


_Value = TypeVar("_Value", bound=Hashable)

_ASPECTS: dict[Aspect, tuple[str, Callable[[Rail], Hashable], Callable[[Rail], str]]] = {
    "place": (
        "is",
        lambda rail: (rail.gpus, rail.gpu_pci, rail.nic_pci),
        lambda rail: f"GPU {','.join(map(str, rail.gpus)) or 'none'} - {rail.nic_pci}",
    ),
    "name": ("is", lambda rail: rail.nic, lambda rail: rail.nic or "without NIC"),
    "rate": (
        "runs at",
        lambda rail: rail.rate_gbps,
        lambda rail: "an unknown speed" if rail.rate_gbps is None else f"{rail.rate_gbps:g} Gb/s",
    ),
}


def differences(maps: Sequence[RailMap]) -> list[Difference]:
    """Every group of nodes that differs from the most, for each rail and aspect."""
    if len(maps) < 2:
        return []
    counts = _minorities([(found, len(found.rails)) for found in maps])
    listed = [
        Difference(nodes, others, "rails", None, f"{counted(count, 'rail')}, not {usual}")
        for nodes, others, count, usual in counts
    ]
    usual_count = Counter(len(found.rails) for found in maps).most_common(1)[0][0]
    alike = [found for found in maps if len(found.rails) == usual_count]
    for index in range(usual_count):
        for aspect, (verb, value, shown) in _ASPECTS.items():
            # A NIC that is missing has no place and no speed; that is a problem of its node, and told as such.
            present = [(found, value(found.rails[index])) for found in alike if _comparable(found.rails[index])]
            text = {value(found.rails[index]): shown(found.rails[index]) for found in alike}
            listed += [
                Difference(nodes, others, aspect, index, f"rail {index} {verb} {text[odd]}, not {text[usual]}")
                for nodes, others, odd, usual in _minorities(present)
            ]
    return listed


def _comparable(rail: Rail) -> bool:
    return rail.nic_pci is not None


def _minorities(
    values: Sequence[tuple[RailMap, _Value]],
) -> list[tuple[tuple[str, ...], int, _Value, _Value]]:
    """(nodes, how many have the usual value, their value, the usual one) for each unusual value."""
    counts = Counter(value for _, value in values)
    if len(counts) < 2:
        return []
    usual, n_usual = counts.most_common(1)[0]
    return [
        (tuple(found.node for found, value in values if value == odd), n_usual, odd, usual)
        for odd in counts
        if odd != usual
    ]


def identical(maps: Sequence[RailMap]) -> list[list[RailMap]]:
    """The maps in groups of identical ones (but for the node), the largest group first."""
    groups: dict[Hashable, list[RailMap]] = {}
    for found in maps:
        groups.setdefault((found.source, found.rails, found.others, found.problems), []).append(found)
    return sorted(groups.values(), key=len, reverse=True)
