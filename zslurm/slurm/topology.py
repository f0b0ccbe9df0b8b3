"""Which nodes hang on which leaf switch, and an order of nodes in which neighbours stay together.

Ranks are numbered node by node, and most traffic of a ring or a tree goes to the next ranks: in leaf order it
stays on the leaf. Slurm knows the leaves if the site uses topology/tree (switches), block, ring or torus3d.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from zslurm.slurm.hostlist import compress, expand, natural_key

_FIELD = re.compile(r"(\w+)=(\S*)")
_KINDS = {"SwitchName": "tree", "BlockName": "block", "RingName": "ring", "TorusName": "torus3d"}
"""First word of a line of `scontrol show topology` -> the topology that has such lines."""


@dataclass
class _Switch:
    nodes: list[str] = field(default_factory=list)
    below: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class SlurmTopology:
    """A topology of the cluster.

    Attributes:
        kind: tree, block, ring or torus3d; empty if Slurm knows no leaves (topology/none, flat).
        leaves: leaf -> its nodes; leaves that hang on one switch follow each other. Blocks and rings are leaves.
    """

    kind: str = ""
    leaves: Mapping[str, list[str]] = field(default_factory=dict)


def parse_topology(text: str) -> SlurmTopology:
    """Read the answer of `scontrol show topology`.

    The lines show what kind it is. TopologyPlugin does not: it is topology/flat at a site with topology.yaml.

    Raises:
        HostlistError: a node list is none.
    """
    switches: dict[str, _Switch] = {}
    kind = ""
    for line in text.splitlines():
        values = dict(_FIELD.findall(line))
        word = next((word for word in _KINDS if values.get(word)), None)
        if word is not None:
            kind = _KINDS[word]
            switches[values[word]] = _Switch(expand(values.get("Nodes", "")), expand(values.get("Switches", "")))
    children = {name for switch in switches.values() for name in switch.below}
    ordered: dict[str, list[str]] = {}
    for root in switches:
        if root not in children:
            ordered |= dict(_leaves(root, switches))
    return SlurmTopology(kind, ordered)


def _leaves(name: str, switches: Mapping[str, _Switch]) -> Iterator[tuple[str, list[str]]]:
    """Yield the leaves below a switch, depth first. A switch above others repeats their nodes: it is no leaf."""
    switch = switches.get(name, _Switch())
    if not switch.below and switch.nodes:
        yield name, switch.nodes
    for child in switch.below:
        yield from _leaves(child, switches)


def order_by_leaf(nodes: Sequence[str], leaves: Mapping[str, Sequence[str]]) -> list[str]:
    """Return the nodes leaf by leaf, in natural order within each; nodes of no leaf come last.

    `leaves` (leaf -> its nodes) are in the order in which they are wanted. A node that is on several of them, as
    with rails, counts for the first.
    """
    leaf_of: dict[str, int] = {}
    for index, members in enumerate(leaves.values()):
        for node in members:
            leaf_of.setdefault(node, index)
    return sorted(nodes, key=lambda node: (leaf_of.get(node, len(leaves)), natural_key(node)))


def hostlist_in_order(nodes: Sequence[str]) -> str:
    """Return one hostlist that names the nodes in exactly this order: `node[0,2],node1`."""
    texts: list[str] = []
    begin = 0
    while begin < len(nodes):
        size = _names_in_order(nodes, begin)
        texts.append(compress(nodes[begin : begin + size]))
        begin += size
    return ",".join(texts)


def _names_in_order(nodes: Sequence[str], begin: int) -> int:
    """Return how many nodes from an index on one hostlist names in their order; at least 1.

    Sizes are doubled, then halved: with thousands of nodes, one at a time takes minutes.
    """

    def is_in_order(size: int) -> bool:
        names = list(nodes[begin : begin + size])
        return expand(compress(names)) == names

    fits, most = 1, len(nodes) - begin
    while fits < most and is_in_order(min(2 * fits, most)):
        fits = min(2 * fits, most)
    too_many = min(2 * fits, most + 1)
    while too_many - fits > 1:
        size = (fits + too_many) // 2
        fits, too_many = (size, too_many) if is_in_order(size) else (fits, size)
    return fits


def usual_leaf_size(leaves: Mapping[str, Sequence[str]]) -> int | None:
    """Return how many nodes most leaf switches have, of several such numbers the smallest; None without leaves."""
    sizes = Counter(len(nodes) for nodes in leaves.values())
    return min(sizes, key=lambda size: (-sizes[size], size), default=None)
