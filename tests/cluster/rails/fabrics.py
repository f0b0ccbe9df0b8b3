"""Fabrics of tests: the form of the published one, and drawn ones."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from typing import Any

from hypothesis import strategies as st

from zslurm.cluster.rails.fabric import Fabric, fabric_of
from zslurm.config.fabric import FabricSection

LEAVES, RAILS = 4, 8


def published_form(units: Sequence[str], **more: Any) -> FabricSection:
    """Eight rails on four leaf switches for each unit of nodes, two slices on each leaf, four spines."""
    slices = [
        {"leaf": f"leaf{LEAVES * unit + leaf}", "rails": [2 * leaf, 2 * leaf + 1], "nodes": nodes}
        for unit, nodes in enumerate(units)
        for leaf in range(LEAVES)
    ]
    return FabricSection.model_validate({"leaves": LEAVES, "spines": 4, "port_gbps": 400, "slices": slices} | more)


def fabric(section: FabricSection) -> Fabric:
    found = fabric_of(section)
    assert found is not None
    return found


@st.composite
def drawn_fabrics(draw: st.DrawFn, max_nodes: int) -> tuple[Fabric, list[str]]:
    """Nodes in any order on drawn slices of one to four rails, each cut in another way; some nodes on none."""
    nodes = [f"n{index}" for index in range(draw(st.integers(1, max_nodes)))]
    rails = draw(st.integers(1, 4))
    listed = draw(st.lists(st.sampled_from(nodes), min_size=1, unique=True))
    slices = {node: tuple(draw(st.sampled_from("abc")) for _ in range(rails)) for node in listed}
    return Fabric(slices), draw(st.permutations(nodes))


def hops_by_hand(found: Fabric, ring: Sequence[str]) -> int:
    """One switch for each message inside a slice, three for each other one."""
    if len(ring) == 1:
        return 0
    total = 0
    for position, node in enumerate(ring):
        following = ring[(position + 1) % len(ring)]
        for rail in range(found.rails):
            known = node in found.slices and following in found.slices
            total += 1 if known and found.slices[node][rail] == found.slices[following][rail] else 3
    return total


def least_hops(found: Fabric, nodes: Iterable[str]) -> int:
    """The hop count of the best of all orders. A ring may begin anywhere."""
    first, *others = nodes
    return min(hops_by_hand(found, (first, *rest)) for rest in itertools.permutations(others))
