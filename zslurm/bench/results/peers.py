"""Which of several equal things is slow: GPUs, rails, nodes or pairs of them, each compared with its peers.

Every peer is measured at the same moments as all others, n times. A peer's figure at a moment is divided by the
median of the others' at that moment, so that what disturbs all of them (a busy machine, a shared link) cancels;
the median of these ratios over the moments is the peer's share of what is usual. A peer is named if both hold:

    it matters     its share is below 1 - max(FLOOR, SPREAD x the robust deviation of the others' shares): equal
                   GPUs differ by a few percent, and less than this is not worth a node
    it is sure     it is TOLERANCE below the lower median of the others at more moments than chance allows

Chance is a sign test, exact and without a model of the noise. If peers are equal, each of them is below the lower
median of the others at a moment with probability 1/2 at most, whatever distribution the figures have, as long as
it is the same for all; so m of n moments or more have the probability

    P(m) = sum over i >= m of C(n, i) / 2^n        of a peer

and a peer is named if P(m) <= FALSE_NAMES / peers: comparing equal peers names one in at most FALSE_NAMES of
the comparisons (of several compared at once, by Bonferroni's bound). Moments that follow each other are not always
independent, for a disturbance may last longer than one: n and m are divided by 1 + 2 (r1 + r2 + ...), r being the
correlations of the sides of the median on which moments are that are 1, 2, ... apart, as far as they are above
their own error of n^-1/2.

The least slowdown that is named almost surely (`visible`; in 99 of 100 comparisons) follows from the same order
statistics. With w = how far the moment that decides the test is above the peer's median ratio, which is Z_NAMED
standard errors of that median, a slowdown of TOLERANCE + w is named every other time, and Z_SEEN standard errors
more suffice. What cannot be
told apart: a peer that is slow, and one that is disturbed during the whole measurement.

With two peers the slower one is named: which of two is right cannot be known, only that they differ.

Pairs (of nodes, or of GPUs) are swept in rounds in which everyone has one partner, n - 1 rounds for n members. A
member most of whose pairs are slow is named itself; the slow pairs that are left are named as pairs.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from statistics import median
from typing import Literal

from zslurm.checkpoint_tools.quantities import counted
from zslurm.slurm.hostlist import compress, natural_key

FLOOR = 0.1
TOLERANCE = 0.05
SPREAD = 4.0
FALSE_NAMES = 0.001
"""See above."""
_Z_NAMED, _Z_SEEN = 3.3, 2.33
_TO_SIGMA = 1.4826
"""The median absolute deviation of a normal distribution times this is its standard deviation."""
_FEWEST_OTHERS = 4
_MOST_NAMED = 8
_SEES_NOTHING = 0.9

Better = Literal["higher", "lower"]
Pair = tuple[str, str]


@dataclass(frozen=True)
class Slow:
    """A peer that is slower than the others.

    Attributes:
        name: of the peer.
        share: of the usual rate that it has; 0.8 is 20 % slower.
    """

    name: str
    share: float

    @property
    def text(self) -> str:
        """Return its name, with how much slower it is."""
        return f"{self.name} ({100 * (1 - self.share):.0f} % slower)"


@dataclass(frozen=True)
class PeerComparison:
    """What came of comparing peers.

    Attributes:
        peers: how many there were.
        slow: those that are slow, the slowest first.
        visible: the least slowdown that every peer would almost surely be named for, as a share; 1 if the
            moments are too few, or too noisy, to name anyone.
    """

    peers: int
    slow: tuple[Slow, ...]
    visible: float

    def line(self, kind: str) -> str:
        """Return the result in a line; `kind` is what a peer is, such as "GPU"."""
        if self.peers < 2:
            return f"one {kind} alone: there is no peer to compare it with"
        if not self.slow:
            seen = f"a slowdown of {100 * self.visible:.0f} % would be seen"
            if self.visible > _SEES_NOTHING:
                seen = "the measurements are too few or too noisy to see one"
            return f"no {kind} of {self.peers} is slower than its peers ({seen})"
        named = ", ".join(peer.text for peer in self.slow[:_MOST_NAMED])
        more = f" and {len(self.slow) - _MOST_NAMED} more" if len(self.slow) > _MOST_NAMED else ""
        verb = "is" if len(self.slow) == 1 else "are"
        return f"{len(self.slow)} of {counted(self.peers, kind)} {verb} slower than the others: {named}{more}"


def compare_peers(samples: Mapping[str, Sequence[float]], *, better: Better = "higher") -> PeerComparison:
    """Name the slow ones of several peers.

    Args:
        samples: figures of each peer; the n-th of all were measured at the same time.
        better: whether a figure is a rate (higher is better) or a time.

    Raises:
        ValueError: a peer has no samples or another number of them, or a figure is not positive.
    """
    names = list(samples)
    counts = {len(values) for values in samples.values()}
    if len(counts) > 1 or 0 in counts:
        raise ValueError("peers need the same number of samples, one at least")
    if any(not (math.isfinite(value) and value > 0) for values in samples.values() for value in values):
        raise ValueError("figures of peers are positive numbers")
    if len(names) < 2:
        return PeerComparison(len(names), (), 0.0)
    logs = {
        name: [math.log(value) if better == "higher" else -math.log(value) for value in values]
        for name, values in samples.items()
    }
    ratios: dict[str, list[float]] = {name: [] for name in names}
    below: dict[str, list[float]] = {name: [] for name in names}
    for moment in range(counts.pop()):
        ordered = sorted(logs[name][moment] for name in names)
        for name in names:
            value = logs[name][moment]
            low, high = _middle_without(ordered, value)
            ratios[name].append(value - (low + high) / 2)
            below[name].append(value - low)
    shares = {name: median(values) for name, values in ratios.items()}
    ordered = sorted(shares.values())
    slow, visible = [], 0.0
    for name in names:
        matters = -math.log(1 - FLOOR)
        if len(names) > _FEWEST_OTHERS:
            others = list(ordered)
            others.remove(shares[name])
            matters = max(matters, SPREAD * _deviation(others))
        decides = _deciding(below[name], len(names))
        if decides is None:
            visible = math.inf
            continue
        width = max(0.0, decides - shares[name])
        error = width / _Z_NAMED
        visible = max(visible, matters + _Z_SEEN * error, TOLERANCE + width + _Z_SEEN * error)
        if decides < -TOLERANCE and shares[name] < -matters:
            slow.append(Slow(name, math.exp(shares[name])))
    slow.sort(key=lambda peer: (peer.share, natural_key(peer.name)))
    return PeerComparison(len(names), tuple(slow), 1 - math.exp(-visible))


def _middle_without(ordered: Sequence[float], value: float) -> tuple[float, float]:
    """Return the two middle ones of sorted values without one of them; twice the same of an odd number."""
    others, position = len(ordered) - 1, bisect_left(ordered, value)
    low, high = ((others - 1) // 2, others // 2)
    first, second = (ordered[index if index < position else index + 1] for index in (low, high))
    return first, second


def _deciding(values: Sequence[float], peers: int) -> float | None:
    """Return the order statistic that is below zero if the sign test names; None if no moments suffice."""
    independent = _independent(values)
    needed = _needed(independent, FALSE_NAMES / peers)
    if needed is None:
        return None
    return sorted(values)[math.ceil(needed / independent * len(values)) - 1]


def _independent(values: Sequence[float]) -> int:
    """Return how many independent values these are worth, by how long they stay on one side of their median."""
    count, middle = len(values), median(values)
    sides = [(value > middle) - (value < middle) for value in values]
    square = sum(side * side for side in sides)
    each_is_worth = 1.0
    for lag in range(1, count // 2):
        correlation = sum(a * b for a, b in zip(sides, sides[lag:], strict=False)) / max(1, square)
        if correlation <= 1 / math.sqrt(count):
            break
        each_is_worth += 2 * correlation
    return max(1, int(count / each_is_worth))


@lru_cache
def _needed(count: int, chance: float) -> int | None:
    """Return the least m with P(m) <= chance, of `count` moments; None if all of them are too few."""
    tail, needed = 0.0, None
    for m in range(count, -1, -1):
        tail += math.comb(count, m) / 2**count
        if tail > chance:
            break
        needed = m
    return needed


def fewest_moments(peers: int, disturbed: float = 0.1) -> int:
    """Return from how many moments on a slow one of `peers` peers is named, if it is not slow at some of them.

    Args:
        peers: that are compared.
        disturbed: share of the moments at which it need not be slow.
    """
    count = 1
    while (needed := _needed(count, FALSE_NAMES / peers)) is None or needed > (1 - disturbed) * count:
        count += 1
    return count


def _deviation(values: Sequence[float]) -> float:
    """Return the robust standard deviation of values."""
    middle = median(values)
    return _TO_SIGMA * median(abs(value - middle) for value in values)


def exclude_line(nodes: Sequence[str]) -> str:
    """Return how Slurm is asked to leave nodes out."""
    return f"--exclude={compress(nodes)}"


def rounds(members: Sequence[str]) -> list[list[Pair]]:
    """Return all pairs, in rounds of disjoint ones that can be measured at the same time (the circle method).

    With an odd number, one member pauses in each round.
    """
    circle: list[str | None] = list(members)
    if len(circle) % 2:
        circle.append(None)
    half, pairs_by_round = len(circle) // 2, []
    for _ in range(len(circle) - 1):
        pairs = zip(circle[:half], reversed(circle[half:]), strict=True)
        pairs_by_round.append([(a, b) for a, b in pairs if a is not None and b is not None])
        circle[1:] = [circle[-1], *circle[1:-1]]
    return pairs_by_round


def slow_pairs(samples: Mapping[Pair, Sequence[float]]) -> list[tuple[Pair, float]]:
    """Name the slow pairs of a sweep, by rates, each with its share of the usual rate; the slowest first.

    Pairs of a member that is slow with most of its partners are left out: the member is at fault, not they.

    Raises:
        ValueError: as `compare_peers`.
    """
    names = {"\0".join(pair): pair for pair in samples}
    comparison = compare_peers({name: samples[pair] for name, pair in names.items()})
    remaining = {names[peer.name]: peer.share for peer in comparison.slow}
    degree = Counter(member for pair in samples for member in pair)
    while remaining:
        # The member with most slow pairs first: what it explains is not counted against its partners.
        slow = Counter(member for pair in remaining for member in pair)
        worst = max(slow, key=lambda member: slow[member] / degree[member])
        if 2 * slow[worst] <= degree[worst] or slow[worst] < 2:
            break
        remaining = {pair: share for pair, share in remaining.items() if worst not in pair}
    return sorted(remaining.items(), key=lambda item: item[1])
