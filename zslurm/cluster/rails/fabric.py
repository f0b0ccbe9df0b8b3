"""The order of nodes on a rails-only fabric, and which nodes cost the fewest hops.

Between nodes, traffic of rail i goes from rank i of one node to rank i of the next, on all rails at once. A
message passes one switch if both NICs are on one slice of a leaf, and three (leaf, spine, leaf) otherwise. The
hop count of an order of nodes is the number of switches that one message on each rail from each node to the next
passes, the last node's to the first included: a step of a ring collective.

Only which nodes are on the same slices matters: nodes with the same slices follow each other in a shortest ring,
and what is left is a tour over the different sets of slices (`shortest_ring`), of which there are few.
"""

from __future__ import annotations

import itertools
import operator
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from zslurm.cluster.rails.shortest_ring import (
    EXACT_POINTS,
    Distances,
    cheapest_place,
    shortest_tour,
    shortest_tours,
)
from zslurm.config.fabric import FabricSection
from zslurm.slurm.hostlist import expand, natural_key

SAME_SLICE, THROUGH_SPINE = 1, 3
"""Switches that a message passes."""

_SEEDS = 16
_MOST_STEPS = 1_000_000  # of growing sets of slices from seeds: fewer seeds where there are many sets
_UNLISTED: tuple[str, ...] = ()

Slices = tuple[str, ...]


@dataclass(frozen=True)
class Fabric:
    """Which slices each node is on.

    Attributes:
        slices: node -> its slice on each rail. A node that is not in it is taken to share no slice.
    """

    slices: Mapping[str, Slices]

    @property
    def rails(self) -> int:
        """Return the number of rails."""
        return max((len(of_node) for of_node in self.slices.values()), default=0)

    def part(self, nodes: Iterable[str]) -> Fabric:
        """Return the fabric of only these nodes."""
        return Fabric({node: self.slices[node] for node in nodes if node in self.slices})

    def apart(self, one: str, other: str) -> int:
        """Return the number of rails on which two different nodes share no slice."""
        return self._distance(self.slices.get(one, _UNLISTED), self.slices.get(other, _UNLISTED))

    def ring_hops(self, order: Sequence[str]) -> int:
        """Return the hop count of a ring over different nodes in this order: 0 for one, which sends nothing."""
        if len(order) < 2:
            return 0
        crossings = sum(self.apart(*pair) for pair in zip(order, [*order[1:], order[0]], strict=True))
        return len(order) * self.rails * SAME_SLICE + crossings * (THROUGH_SPINE - SAME_SLICE)

    def order(self, nodes: Sequence[str]) -> list[str]:
        """Return the nodes in the order of a shortest ring: the same one, however they come."""
        groups = self.groups(nodes)
        tour = shortest_tour(self._distances(list(groups)))
        members = list(groups.values())
        return [node for point in tour for node in members[point]]

    def nearest(self, nodes: Sequence[str], count: int) -> list[str]:
        """Return the `count` nodes whose shortest ring is the shortest, in its order; fewer if there are."""
        listed = [node for node in nodes if node in self.slices]
        if len(listed) <= count:
            others = sorted(set(nodes).difference(listed), key=natural_key)
            return self.order([*listed, *others[: count - len(listed)]])
        groups = self.groups(listed)
        sizes = [len(members) for members in groups.values()]
        near = [
            (chosen, tour)
            for chosen, tour in _tours(self._distances(list(groups)), sizes, count)
            if len(chosen) <= count <= sum(sizes[point] for point in chosen)
        ]
        rings = [(chosen, self._filled(tour, list(groups.values()), count)) for chosen, tour in near]
        return min(rings, key=lambda ring: (self.ring_hops(ring[1]), len(ring[0]), ring[0]))[1]

    def farthest(self, nodes: Sequence[str], count: int) -> list[str]:
        """Return the `count` listed nodes whose shortest ring is the longest, in its order."""
        groups = self.groups([node for node in nodes if node in self.slices])
        members, sets = list(groups.values()), list(groups)
        most, distances = min(count, len(sets)), self._distances(sets)
        # One more set of slices never makes the ring shorter, so it has as many as there are nodes.
        if len(sets) <= EXACT_POINTS:
            choices = [tour for chosen, tour in shortest_tours(distances).items() if len(chosen) == most]
        else:
            choices = [_tour_of(distances, _spread(distances, most))]
        rings = [self._filled(tour, members, count) for tour in choices]
        return max(rings, key=self.ring_hops, default=[])

    def join(self, kept: Sequence[str], spares: Sequence[str], count: int) -> list[str]:
        """Return `count` of the spares, one after the other the one with which the ring is the shortest.

        With many sets of slices: the one that makes the ring the least longer, put between two of the others.
        """
        if len(self.groups([*kept, *spares])) > EXACT_POINTS:
            return self._insert(kept, spares, count)
        chosen: list[str] = []
        while len(chosen) < min(count, len(spares)):
            # Spares with the same slices cost the same: the first of each is tried.
            tried = [members[0] for members in self.groups([s for s in spares if s not in chosen]).values()]
            rings = [(self.ring_hops(self.order([*kept, *chosen, spare])), spare) for spare in tried]
            chosen.append(min(rings, key=lambda ring: (ring[0], natural_key(ring[1])))[1])
        return chosen

    def _insert(self, kept: Sequence[str], spares: Sequence[str], count: int) -> list[str]:
        groups = self.groups([*kept, *spares])
        sets = list(groups)
        distances = self._distances(sets)
        number = {slices: point for point, slices in enumerate(sets)}
        taken = sorted({number[self.slices.get(node, _UNLISTED)] for node in kept})
        tour = _tour_of(distances, taken)
        unused = {number[slices]: members for slices, members in self.groups(spares).items()}
        chosen: list[str] = []
        while len(chosen) < min(count, len(spares)):
            # Nodes with the same slices cost nothing next to each other; nodes on no slice share none.
            costs = {
                point: (0 if sets[point] else self.rails, None)
                if point in tour
                else cheapest_place(distances, tour, point)
                for point in unused
            }
            point = min(unused, key=lambda point: (costs[point][0], natural_key(unused[point][0])))
            if (insertion := costs[point][1]) is not None:
                tour.insert(insertion, point)
            chosen.append(unused[point].pop(0))
            if not unused[point]:
                del unused[point]
        return chosen

    def groups(self, nodes: Sequence[str]) -> dict[Slices, list[str]]:
        """Return the nodes of each set of slices, in natural order.

        Nodes of which nothing is known are one group: they share no slice, but cost the least next to each other.
        """
        groups: dict[Slices, list[str]] = {}
        for node in sorted(nodes, key=natural_key):
            groups.setdefault(self.slices.get(node, _UNLISTED), []).append(node)
        return groups

    def _distance(self, one: Slices, other: Slices) -> int:
        if not one or not other:
            return self.rails
        return sum(map(operator.ne, one, other))

    def _distances(self, sets: Sequence[Slices]) -> list[list[int]]:
        table = [[0] * len(sets) for _ in sets]
        for number, row_set in enumerate(sets):
            for column_set in range(number):
                table[number][column_set] = table[column_set][number] = self._distance(row_set, sets[column_set])
        return table

    def _filled(self, tour: Sequence[int], members: Sequence[Sequence[str]], count: int) -> list[str]:
        """Return `count` nodes of the groups of a tour, some of each: what is left out is of the largest."""
        taken = {point: len(members[point]) for point in tour}
        while sum(taken.values()) > count:
            taken[max(taken, key=lambda point: (taken[point], point))] -= 1
        return [node for point in tour for node in members[point][: taken[point]]]


def _tours(distances: Distances, sizes: Sequence[int], count: int) -> Iterable[tuple[tuple[int, ...], list[int]]]:
    """Return sets of slices whose nodes may be chosen, by their positions, each with a shortest tour."""
    if len(sizes) <= EXACT_POINTS:
        return shortest_tours(distances).items()
    largest = sorted(range(len(sizes)), key=lambda point: (-sizes[point], point))
    seeds = max(1, min(_SEEDS, _MOST_STEPS // len(sizes) ** 2))
    grown = {_grown(distances, sizes, seed, count) for seed in largest[:seeds]}
    return [(chosen, _tour_of(distances, chosen)) for chosen in sorted(grown)]


def _grown(distances: Distances, sizes: Sequence[int], seed: int, count: int) -> tuple[int, ...]:
    """Return the seed and the sets nearest to it that have enough nodes together, the larger first."""
    chosen, remaining, nodes_held = [seed], set(range(len(sizes))) - {seed}, sizes[seed]
    away = list(distances[seed])
    while nodes_held < count:
        nearest = min(remaining, key=lambda point: (away[point], -sizes[point], point))
        chosen.append(nearest)
        remaining.remove(nearest)
        nodes_held += sizes[nearest]
        away = list(map(min, away, distances[nearest]))
    return tuple(sorted(chosen))


def _spread(distances: Distances, most: int) -> tuple[int, ...]:
    """Return a number of sets, each as far as possible from the sets chosen before."""
    chosen, remaining, away = [0], set(range(1, len(distances))), list(distances[0])
    while len(chosen) < most:
        farthest = max(remaining, key=lambda point: (away[point], -point))
        chosen.append(farthest)
        remaining.remove(farthest)
        away = list(map(min, away, distances[farthest]))
    return tuple(sorted(chosen))


def _tour_of(distances: Distances, chosen: Sequence[int]) -> list[int]:
    tour = shortest_tour([[distances[start][end] for end in chosen] for start in chosen])
    return [chosen[point] for point in tour]


def fabric_of(section: FabricSection) -> Fabric | None:
    """Return the fabric that a profile describes; None if it lists no slices."""
    if not section.slices:
        return None
    rails = {rail: position for position, rail in enumerate(section.rails)}
    slices: dict[str, list[str]] = {}
    for number, slice_ in enumerate(section.slices):
        for node, rail in itertools.product(expand(slice_.nodes), slice_.rails):
            # A rail of which nothing is known for a node shares no slice with any other node's.
            switches = slices.setdefault(node, [f"{node}?"] * len(rails))
            switches[rails[rail]] = f"{slice_.leaf}/{number}"
    return Fabric({node: tuple(switches) for node, switches in slices.items()})


def most_loaded(fabric: Fabric, nodes: Sequence[str]) -> int:
    """Return the most of these nodes on one slice whose rail also has some of them elsewhere; 0 if none has.

    So many ports feed the uplinks of that slice.
    """
    most = 0
    for rail in range(fabric.rails):
        load = Counter(fabric.slices[node][rail] if node in fabric.slices else f"{node}?" for node in nodes)
        if len(load) > 1:
            most = max(most, *load.values())
    return most
