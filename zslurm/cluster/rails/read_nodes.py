"""The rails of many nodes, which are all asked for their facts at the same time, and their inconsistencies.

Two things must match. The location: rail, local ranks, and the PCI addresses. It decides which plane of
switches a rank's traffic takes, and on a rails-only network a node whose rank 3 sends on plane 4 reaches no other.
And the name of the NIC: NCCL_IB_HCA is one list for all nodes and filters by name, so a node on which a rail's
card has another name loses that rail, or uses a card that is none. Speed of the links is compared as well.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeVar

from zslurm.checkpoint_tools.quantities import counted
from zslurm.cluster.rails.map import rail_map
from zslurm.cluster.rails.types import Rail, RailMap
from zslurm.config.spec import ClusterSection
from zslurm.hardware.facts import from_json
from zslurm.slurm.hostlist import compress, natural_key
from zslurm.slurm.on_nodes.run_on_nodes import NodeAnswer, run_on_nodes

FACTS = "zslurm.hardware.facts"

Aspect = Literal["rails", "place", "name", "rate"]


@dataclass(frozen=True)
class NodeDifference:
    """Nodes that agree with each other and differ from the most.

    Attributes:
        nodes: their names.
        others: how many nodes they are compared with.
        aspect: in what they differ.
        rail: that differs; None if the number of rails differs.
    """

    nodes: tuple[str, ...]
    others: int
    aspect: Aspect
    rail: int | None
    message: str

    def __str__(self) -> str:
        is_single = len(self.nodes) == 1
        which = compress(self.nodes) if is_single else f"{compress(self.nodes)} (these {len(self.nodes)})"
        return f"{which} {'differs' if is_single else 'differ'} from the other {self.others}: {self.message}"


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


def differences(maps: Sequence[RailMap]) -> list[NodeDifference]:
    """Return every group of nodes that differs from the most, for each rail and aspect."""
    if len(maps) < 2:
        return []
    counts = _minorities([(rail_map_of_node, len(rail_map_of_node.rails)) for rail_map_of_node in maps])
    listed = [
        NodeDifference(nodes, others, "rails", None, f"{counted(count, 'rail')}, not {usual}")
        for nodes, others, count, usual in counts
    ]
    usual_count = Counter(len(rail_map_of_node.rails) for rail_map_of_node in maps).most_common(1)[0][0]
    same = [rail_map_of_node for rail_map_of_node in maps if len(rail_map_of_node.rails) == usual_count]
    for index in range(usual_count):
        for aspect, (verb, value, shown) in _ASPECTS.items():
            # A NIC that is missing has no address and no speed; that is reported as a problem of its node.
            present = [
                (rail_map_of_node, value(rail_map_of_node.rails[index]))
                for rail_map_of_node in same
                if rail_map_of_node.rails[index].nic_pci
            ]
            text = {
                value(rail_map_of_node.rails[index]): shown(rail_map_of_node.rails[index])
                for rail_map_of_node in same
            }
            listed += [
                NodeDifference(nodes, others, aspect, index, f"rail {index} {verb} {text[odd]}, not {text[usual]}")
                for nodes, others, odd, usual in _minorities(present)
            ]
    return listed


def _minorities(
    values: Sequence[tuple[RailMap, _Value]],
) -> list[tuple[tuple[str, ...], int, _Value, _Value]]:
    """(nodes, how many have the usual value, their value, the usual one) for each unusual value."""
    counts = Counter(value for _, value in values)
    if len(counts) < 2:
        return []
    usual, n_usual = counts.most_common(1)[0]
    return [
        (tuple(rail_map_of_node.node for rail_map_of_node, value in values if value == odd), n_usual, odd, usual)
        for odd in counts
        if odd != usual
    ]


def identical(maps: Sequence[RailMap]) -> list[list[RailMap]]:
    """Return the maps in groups of identical ones (but for the node), the largest group first."""
    groups: dict[Hashable, list[RailMap]] = {}
    for rail_map_of_node in maps:
        groups.setdefault(
            (rail_map_of_node.source, rail_map_of_node.rails, rail_map_of_node.others, rail_map_of_node.problems),
            [],
        ).append(rail_map_of_node)
    return sorted(groups.values(), key=len, reverse=True)


@dataclass(frozen=True)
class RailReadings:
    """What was found.

    Attributes:
        maps: of the nodes that answered, in natural order.
        unanswered: node -> why it did not answer, or not with facts.
        differences: between the nodes.
    """

    maps: tuple[RailMap, ...]
    unanswered: Mapping[str, str]
    differences: tuple[NodeDifference, ...]

    @property
    def incomplete(self) -> dict[str, RailMap]:
        """Nodes on which a rail cannot work."""
        return {
            rail_map_of_node.node: rail_map_of_node
            for rail_map_of_node in self.maps
            if rail_map_of_node.incomplete
        }


def read_rails(cluster: ClusterSection, **where: Any) -> RailReadings:
    """Ask nodes for their facts, and work out their rails; `where` are arguments of `run_on_nodes`.

    Raises:
        SlurmUnavailable, SlurmRefused: no node could be asked.
    """
    return rails_of_answers(list(run_on_nodes(FACTS, **where).values()), cluster)


def rails_of_answers(answers: Sequence[NodeAnswer], cluster: ClusterSection) -> RailReadings:
    """Return the rails of the nodes that gave these answers."""
    maps, silent = [], {}
    for answer in sorted(answers, key=lambda answer: natural_key(answer.node)):
        if answer.error is not None:
            silent[answer.node] = answer.error
            continue
        try:
            maps.append(rail_map(from_json(answer.value), cluster))
        except ValueError:
            silent[answer.node] = "its answer is not what this version of zslurm asks for"
    return RailReadings(tuple(maps), silent, tuple(differences(maps)))
