"""The shortest closed tour over points whose distances obey the triangle inequality, and over subsets of them.

Exact up to `EXACT_POINTS` by the recursion of Held and Karp (J. SIAM 10, 1962) in 2^n n^2 steps, which gives the
tour of every subset as well; beyond by a local search (nearest neighbour, then 2-opt), which is never worse than
the order in which the points are given, and tries a limited number of exchanges: with 1,024 points it ends in well
under a second.
"""

from __future__ import annotations

from collections.abc import Sequence

EXACT_POINTS = 10
_MOST_TRIED = 200_000

Distances = Sequence[Sequence[int]]


def tour_length(distances: Distances, tour: Sequence[int]) -> int:
    """Return the length of a closed tour."""
    return sum(distances[start][end] for start, end in zip(tour, [*tour[1:], *tour[:1]], strict=True))


def shortest_tour(distances: Distances) -> list[int]:
    """Return the points in the order of a shortest tour, from point 0."""
    points = len(distances)
    if points <= EXACT_POINTS:
        return shortest_tours(distances)[tuple(range(points))]
    starts = [list(range(points)), _nearest_neighbours(distances)]
    return _uncrossed(distances, min(starts, key=lambda tour: tour_length(distances, tour)))


def cheapest_place(distances: Distances, tour: Sequence[int], point: int) -> tuple[int, int]:
    """Return by how much a further point makes a tour longer at least, and the position for it."""
    if not tour:
        return 0, 0
    between = zip([tour[-1], *tour[:-1]], tour, strict=True)
    to = distances[point]
    return min((to[start] + to[end] - distances[start][end], at) for at, (start, end) in enumerate(between))


def shortest_tours(distances: Distances) -> dict[tuple[int, ...], list[int]]:
    """Return a shortest tour of every subset of at most `EXACT_POINTS` points, by its sorted points.

    Each tour begins with the first point of its subset; of several, it is the same one every time.
    """
    points = len(distances)
    # (subset as bits, last point) -> (length of the shortest path from the subset's first point, the point before)
    paths: dict[tuple[int, int], tuple[int, int]] = {(1 << point, point): (0, -1) for point in range(points)}
    tours: dict[tuple[int, ...], list[int]] = {(): []}
    for subset in range(1, 1 << points):
        members = tuple(point for point in range(points) if subset >> point & 1)
        for last in members[1:]:
            before = subset & ~(1 << last)
            paths[subset, last] = min(
                (paths[before, point][0] + distances[point][last], point)
                for point in members
                if (before, point) in paths
            )
        ends = (point for point in members if (subset, point) in paths)
        last = min(ends, key=lambda point: (paths[subset, point][0] + distances[point][members[0]], point))
        tour = _path_to(paths, subset, last)
        # Both ways round are as long: the one that begins like the points.
        tours[members] = tour if tour[1:2] <= tour[-1:] else [tour[0], *tour[:0:-1]]
    return tours


def _path_to(paths: dict[tuple[int, int], tuple[int, int]], subset: int, last: int) -> list[int]:
    path: list[int] = []
    while last >= 0:
        path.append(last)
        subset, last = subset & ~(1 << last), paths[subset, last][1]
    return path[::-1]


def _nearest_neighbours(distances: Distances) -> list[int]:
    unvisited, tour = set(range(1, len(distances))), [0]
    while unvisited:
        tour.append(min(unvisited, key=lambda point: (distances[tour[-1]][point], point)))
        unvisited.remove(tour[-1])
    return tour


def _uncrossed(distances: Distances, tour: list[int]) -> list[int]:
    """Return the tour after reversing parts of it as long as that makes it shorter (2-opt), within the limit."""
    points, tried, better = len(tour), 0, True
    while better:
        better = False
        for start in range(1, points - 1):
            if tried > _MOST_TRIED:
                return tour
            tried += points - 1 - start
            for end in range(start + 1, points):
                before, first, last, after = tour[start - 1], tour[start], tour[end], tour[(end + 1) % points]
                gain = distances[before][first] + distances[last][after]
                if distances[before][last] + distances[first][after] < gain:
                    tour[start : end + 1] = tour[start : end + 1][::-1]
                    better = True
    return tour
