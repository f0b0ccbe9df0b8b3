"""The section `cluster.fabric`: the switches behind the rails of a rails-only network with two levels.

A leaf switch is cut into slices: groups of its ports, each of which carries one rail for some of the nodes. Two
NICs of a rail that are on one slice reach each other through that leaf; others through a spine switch as well. A
node is on one slice for each rail.
"""

from __future__ import annotations

import itertools
from typing import Annotated

from pydantic import AfterValidator, BeforeValidator, Field, model_validator

from zslurm.checkpoint_tools.quantities import counted
from zslurm.config.text import as_word, one_line
from zslurm.slurm.hostlist import HostlistError, compress, expand
from zslurm.train.sections.section import Count, Positive, Section, Whole


def _names_nodes(value: str) -> str:
    try:
        names = expand(value)
    except HostlistError as error:
        raise ValueError(str(error)) from error
    if not names:
        raise ValueError("names no node")
    return value


Word = Annotated[str, BeforeValidator(as_word), Field(min_length=1), AfterValidator(one_line)]
Hostlist = Annotated[str, AfterValidator(one_line), AfterValidator(_names_nodes)]


class SliceSection(Section):
    """One slice of a leaf switch, or several of the same nodes: one for each rail that is listed."""

    leaf: Word = Field(description="leaf switch that the slice is a part of")
    rails: tuple[Whole, ...] = Field(
        min_length=1,
        description="rails that the leaf carries for these nodes, a slice for each; the first is 0",
    )
    nodes: Hostlist = Field(description="hostlist of the nodes whose NICs of these rails are on it")


class FabricSection(Section):
    """The switches behind the rails; what is not known is left out."""

    leaves: Count | None = Field(None, description="leaf switches over which the rails of a node are divided")
    spines: Count | None = Field(None, description="spine switches that each leaf switch is connected to")
    ports: Count | None = Field(None, description="ports of a slice to nodes")
    port_gbps: Positive | None = Field(None, description="speed of a port to a node, in Gb/s")
    uplinks: Count | None = Field(None, description="ports of a slice to the spine switches, all together")
    uplink_gbps: Positive | None = Field(
        None, description="speed of a port to a spine switch, in Gb/s; default: port_gbps"
    )
    slices: tuple[SliceSection, ...] = Field(
        (), description="which nodes hang on which slice; ranks are then numbered along the shortest ring"
    )

    @model_validator(mode="after")
    def _nodes_are_wired_once(self) -> FabricSection:
        place_of: dict[tuple[int, str], int] = {}
        leaves_of: dict[str, set[str]] = {}
        for index, slice_ in enumerate(self.slices):
            nodes, where = expand(slice_.nodes), f"slices[{index}]"
            if self.ports is not None and len(nodes) > self.ports:
                raise ValueError(
                    f"{where}.nodes: {counted(len(nodes), 'node')} on a slice of {counted(self.ports, 'port')} "
                    "(fabric.ports)"
                )
            if len(set(nodes)) < len(nodes):
                raise ValueError(f"{where}.nodes: a node is listed twice")
            if len(set(slice_.rails)) < len(slice_.rails):
                raise ValueError(f"{where}.rails: a rail is listed twice")
            for rail, node in itertools.product(slice_.rails, nodes):
                if (before := place_of.setdefault((rail, node), index)) != index:
                    raise ValueError(
                        f"{where}.nodes: rail {rail} of {node} is on slices[{before}] already; a NIC has one port"
                    )
                leaves_of.setdefault(node, set()).add(slice_.leaf)
        if self.leaves is not None:
            spread = {node: names for node, names in leaves_of.items() if len(names) > self.leaves}
            if spread:
                node, names = next(iter(spread.items()))
                raise ValueError(
                    f"leaves: {self.leaves}, but the rails of {compress(spread)} are on {len(names)} leaves "
                    f"({', '.join(sorted(names))}); set leaves to {len(names)}, or correct slices"
                )
        return self

    @property
    def rails(self) -> tuple[int, ...]:
        """Return the rails that some slice carries, in order."""
        return tuple(sorted({rail for slice_ in self.slices for rail in slice_.rails}))

    @property
    def summary(self) -> str:
        """Return what is known besides the slices, in one line."""
        speed = f" at {self.port_gbps:g} Gb/s" if self.port_gbps else ""
        up = self.uplink_gbps or self.port_gbps
        parts = [
            f"{counted(self.leaves, 'leaf switch', 'leaf switches')} for each node" if self.leaves else "",
            f"{counted(self.spines, 'spine')} above each leaf" if self.spines else "",
            f"slices of {counted(self.ports, 'port')}{speed}" if self.ports else f"ports{speed}" if speed else "",
            f"{counted(self.uplinks, 'uplink')}{f' at {up:g} Gb/s' if up else ''}" if self.uplinks else "",
        ]
        return ", ".join(word for word in parts if word)

    @property
    def oversubscription(self) -> float | None:
        """Return the speed of all ports of a slice to nodes over the speed of its uplinks; None if unknown."""
        return None if self.ports is None else self.oversubscription_of(self.ports)

    def oversubscription_of(self, nodes: int) -> float | None:
        """Return the same for `nodes` ports of a slice."""
        if self.uplinks is None:
            return None
        if self.port_gbps is None and self.uplink_gbps is not None:
            return None
        relative = 1.0 if self.uplink_gbps is None else self.uplink_gbps / (self.port_gbps or 1.0)
        return nodes / (self.uplinks * relative)
