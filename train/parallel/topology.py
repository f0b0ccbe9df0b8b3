"""Which node and which rail a rank is on, and which part of the layout it has with two-level collectives.

Ranks fill the nodes one after the other: rank = node * local_size + local. Ranks of equal local rank are on one
rail: their GPUs use NICs of one index, which a rails-only network joins to each other and to no others.

    rank        0  1  2  3 | 4  5  6  7        two nodes of four
    node        0  0  0  0 | 1  1  1  1
    rail        0  1  2  3 | 0  1  2  3
    position    0  2  4  6 | 1  3  5  7        rail * nodes + node

A position is the number of a rank's chunk in whatever is divided into one chunk per rank. What a node leaves on
one rail after the first hop of a reduce-scatter is then a contiguous run of chunks, for the second hop to divide:
no element is moved between the hops. Checkpoints record which elements of a tensor each rank wrote, so they do not
depend on it.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class Path(StrEnum):
    """What a message travels over."""

    NODE = "node"  # to another rank of the same node
    RAIL = "rail"  # to another node, on the same rail
    OFF_RAIL = "off_rail"  # to another node and another rail


@dataclass(frozen=True, slots=True)
class Topology:
    """`nodes` nodes of `local_size` ranks each."""

    nodes: int
    local_size: int

    @property
    def ranks(self) -> int:
        """Return how many ranks there are."""
        return self.nodes * self.local_size

    def position(self, rank: int) -> int:
        """Return the number of a rank's chunk in a layout for two levels."""
        node, local = divmod(rank, self.local_size)
        return local * self.nodes + node

    def rank(self, position: int) -> int:
        """Return the rank that has a position."""
        local, node = divmod(position, self.nodes)
        return node * self.local_size + local

    def node_ranks(self, rank: int) -> range:
        """Return the ranks of a rank's node."""
        first = rank // self.local_size * self.local_size
        return range(first, first + self.local_size)

    def rail_ranks(self, rank: int) -> range:
        """Return the ranks of a rank's rail, one on each node."""
        return range(rank % self.local_size, self.ranks, self.local_size)

    def path(self, sender: int, receiver: int) -> Path:
        """Return what a message from one rank to another travels over."""
        if sender // self.local_size == receiver // self.local_size:
            return Path.NODE
        return Path.RAIL if (sender - receiver) % self.local_size == 0 else Path.OFF_RAIL
