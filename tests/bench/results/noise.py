"""Synthetic noise: how often the comparison of peers names an equal one, and how often a slow one.

The figures of peers are drawn, with seeds, from distributions that a measurement may have (NOISES): of peers that
are measured themselves, as in `zslurm bench mlp`, and of members of a sweep of pairs, as in `zslurm bench
collectives`. The test knows which peer is slow. For each kind of noise `rates` returns

    false_names        runs of equal peers in which one was named
    named_at_20        runs with one at 0.8 of the others' rate in which it, and no other, was named
    visible            median over the runs of the slowdown that the comparison states it would see
    named_at_visible   runs with one slowed by just that in which it, and no other, was named

Peer of the last: the 99 of 100 that the comparison promises. The sum over all noises is what the false names are
judged by: of a single kind there are too few.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from itertools import combinations
from statistics import median
from typing import Any

from zslurm.bench.results.findings import compare_members
from zslurm.bench.results.peers import PeerComparison, compare_peers

Figures = dict[str, list[float]]
Noise = Callable[[random.Random, int], list[float]]
"""Draws the factors by which one peer is faster or slower at so many moments."""


def _normal(deviation: float) -> Noise:
    return lambda rng, moments: [rng.lognormvariate(0, deviation) for _ in range(moments)]


def _interrupted(share: float) -> Noise:
    """Little noise, but some moments are lost to other programs: they take up to three times as long."""

    def draw(rng: random.Random, moments: int) -> list[float]:
        return [
            rng.lognormvariate(0, 0.02) * (1 / rng.uniform(1, 3) if rng.random() < share else 1)
            for _ in range(moments)
        ]

    return draw


def _skewed(rng: random.Random, moments: int) -> list[float]:
    """Each moment takes the least time and an exponential part of it, a tenth on average."""
    return [1 / (1 + rng.expovariate(10)) for _ in range(moments)]


def _lasting(deviation: float, correlation: float) -> Noise:
    """Disturbances that last longer than a moment: neighbours are correlated."""

    def draw(rng: random.Random, moments: int) -> list[float]:
        state, found = rng.gauss(0, 1), []
        for _ in range(moments):
            state = correlation * state + math.sqrt(1 - correlation**2) * rng.gauss(0, 1)
            found.append(math.exp(deviation * state))
        return found

    return draw


NOISES: dict[str, Noise] = {
    "normal, 2 %": _normal(0.02),
    "normal, 10 %": _normal(0.1),
    "normal, 30 %": _normal(0.3),
    "a tenth of the moments interrupted": _interrupted(0.1),
    "a third of the moments interrupted": _interrupted(0.33),
    "exponential, 10 %": _skewed,
    "normal, 10 %, correlated 0.5": _lasting(0.1, 0.5),
    "normal, 10 %, correlated 0.8": _lasting(0.1, 0.8),
}


def peers(rng: random.Random, noise: Noise, count: int, moments: int, slow: float) -> PeerComparison:
    """Compare drawn peers, of which the first is slower by `slow`; what all share at a moment is drawn as well."""
    shared = [rng.uniform(0.3, 1.0) for _ in range(moments)]
    figures: Figures = {
        f"peer{peer}": [
            each * common * (1 - slow if peer == 0 else 1)
            for each, common in zip(noise(rng, moments), shared, strict=True)
        ]
        for peer in range(count)
    }
    return compare_peers(figures)


def members(rng: random.Random, noise: Noise, count: int, moments: int, slow: float) -> PeerComparison:
    """Compare the members of drawn pairs: the noise is that of pairs, and a slow member slows all its pairs."""
    return compare_members({
        (f"peer{a}", f"peer{b}"): [each * (1 - slow if a == 0 else 1) for each in noise(rng, moments)]
        for a, b in combinations(range(count), 2)
    })  # fmt: skip


def rates(
    compare: Callable[..., PeerComparison], noise: Noise, count: int, *, moments: int, runs: int, seed: int
) -> dict[str, Any]:
    """Return how many of so many runs named a peer, with none slow and with the first."""
    rng = random.Random(seed)

    def right(slow: float) -> int:
        found = (compare(rng, noise, count, moments, slow).slow for _ in range(runs))
        return sum([each.name for each in named] == ["peer0"] for named in found)

    equal = [compare(rng, noise, count, moments, 0.0) for _ in range(runs)]
    visible = median(each.visible for each in equal)
    return {
        "runs": runs,
        "false_names": sum(bool(each.slow) for each in equal),
        "named_at_20": right(0.2),
        "visible": round(visible, 3),
        "named_at_visible": right(visible) if visible < 1 else None,
    }
