"""What a run's nodes cost on the fabric: hops, and how much of a slice's uplinks they may ask for.

If no nodes are chosen yet, what the best and the worst choice of the profile's nodes would cost.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from zslurm.checkpoint_tools.quantities import counted
from zslurm.cluster.rails.fabric import Fabric, fabric_of, most_loaded
from zslurm.config.fabric import FabricSection
from zslurm.slurm.hostlist import compress, natural_key
from zslurm.slurm.topology import hostlist_in_order


@dataclass(frozen=True)
class RankPlacement:
    """Some nodes on the fabric.

    Attributes:
        nodes: in the order of ranks.
        hops: switches that one message on each rail from each node to the next passes.
        hops_by_name: the same in the order of names.
        ports_up: the most ports of these nodes on a slice that also send to other slices; 0 if none do.
        oversubscription: speed of the ports over the speed of the slice's uplinks; None if either is unknown.
        unlisted: nodes that the profile lists on no slice.
    """

    nodes: tuple[str, ...]
    hops: int
    hops_by_name: int
    ports_up: int
    oversubscription: float | None
    unlisted: tuple[str, ...] = ()

    def as_json(self) -> dict[str, Any]:
        """Return plain values."""
        return {
            "nodes": hostlist_in_order(self.nodes),
            "hops": self.hops,
            "hops_by_name": self.hops_by_name,
            "ports_up": self.ports_up,
            "oversubscription": self.oversubscription,
            "unlisted": compress(self.unlisted),
        }

    def line(self) -> str:
        """Return hops and oversubscription in one line."""
        by_name = f" ({self.hops_by_name} in the order of names)" if self.hops_by_name != self.hops else ""
        return f"{counted(self.hops, 'hop')}{by_name}, {self._load()}{self._unlisted()}"

    def _load(self) -> str:
        if not self.ports_up:
            return "nothing leaves its slice"
        if self.oversubscription is None:
            return "oversubscription unknown (cluster.fabric.uplinks is not given)"
        ports = f"{counted(self.ports_up, 'port')} of a slice {'sends' if self.ports_up == 1 else 'send'} up"
        if self.oversubscription < 1:
            return f"not oversubscribed: {ports}, {100 * self.oversubscription:.2g} % of what its uplinks carry"
        return f"oversubscription {self.oversubscription:.3g}:1 ({ports})"

    def _unlisted(self) -> str:
        return f"; {compress(self.unlisted)}: on no slice of the profile" if self.unlisted else ""


def place(fabric: Fabric, section: FabricSection, nodes: Sequence[str]) -> RankPlacement:
    """Return what these nodes cost in the order of a shortest ring."""
    order, ports = fabric.order(nodes), most_loaded(fabric, nodes)
    return RankPlacement(
        nodes=tuple(order),
        hops=fabric.ring_hops(order),
        hops_by_name=fabric.ring_hops(sorted(nodes, key=natural_key)),
        ports_up=ports,
        oversubscription=section.oversubscription_of(ports) if ports else None,
        unlisted=tuple(sorted(set(nodes).difference(fabric.slices), key=natural_key)),
    )


def placements(
    section: FabricSection, count: int, *, chosen: Sequence[str] = (), excluded: Sequence[str] = ()
) -> dict[str, RankPlacement]:
    """Return what `count` nodes cost, by `chosen`, or by `best` and `worst`.

    Nothing if the profile lists no slices, or too few nodes. Of more chosen nodes than `count` those that are
    nearest to each other count: the others are spares.
    """
    fabric = fabric_of(section)
    if fabric is None:
        return {}
    if len(chosen) >= count:
        return {"chosen": place(fabric, section, fabric.nearest(chosen, count))}
    usable = [node for node in fabric.slices if node not in set(excluded)]
    if len(usable) < count:
        return {}
    candidates = {"best": fabric.nearest(usable, count), "worst": fabric.farthest(usable, count)}
    return {name: place(fabric, section, nodes) for name, nodes in candidates.items()}
