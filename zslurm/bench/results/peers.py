"""Which of several equal things is slow: GPUs, rails, nodes or pairs of them, each compared with its peers.

Every peer is measured at the same moments as all others, several times. A peer's figure at a moment is divided by
the median of the others' at that moment, so that what disturbs all of them (a busy machine, a shared link)
cancels; the median of these ratios over the moments is the peer's share of what is usual. It is slow where that
share is below 1 - t, t being the largest of

    FLOOR               equal GPUs differ by a few percent, and less than this is not worth a node
    NOISE of its own    standard error of its share, from the median absolute deviation of its ratios; with n
                        moments times 1 + FEW / n, for few figures can agree by chance
    NOISE of the peers  the median absolute deviation of the others' shares, if there are three of them at least

and where it is slow at most moments (MOST of them). So equal peers are not named, however noisy they are; t is
reported, for a smaller slowdown cannot be seen. With two peers the slower one is named: which of two is right
cannot be known, only that they differ.

Pairs (of nodes, or of GPUs) are swept in rounds in which everyone has one partner, n - 1 rounds for n members. A
member most of whose pairs are slow is named itself; the slow pairs that are left are named as pairs.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Literal

from zslurm.checkpoint_tools.quantities import counted
from zslurm.slurm.hostlist import compress, natural_key

FLOOR = 0.1
NOISE = 4.0
FEW = 6
MOST = 0.8
"""See above."""
_TO_SIGMA = 1.4826
"""The median absolute deviation of a normal distribution times this is its standard deviation."""
_FEWEST_OTHERS = 3
_MOST_NAMED = 8

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
class Comparison:
    """What came of comparing peers.

    Attributes:
        peers: how many there were.
        slow: those that are slow, the slowest first.
        visible: the least slowdown that every peer would be named for, as a share.
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
            return f"no {kind} of {self.peers} is slower than its peers ({seen})"
        named = ", ".join(each.text for each in self.slow[:_MOST_NAMED])
        more = f" and {len(self.slow) - _MOST_NAMED} more" if len(self.slow) > _MOST_NAMED else ""
        verb = "is" if len(self.slow) == 1 else "are"
        return f"{len(self.slow)} of {counted(self.peers, kind)} {verb} slower than the others: {named}{more}"


def compare_peers(samples: Mapping[str, Sequence[float]], *, better: Better = "higher") -> Comparison:
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
        return Comparison(len(names), (), 0.0)
    logs = {
        name: [math.log(value) if better == "higher" else -math.log(value) for value in values]
        for name, values in samples.items()
    }
    moments = range(counts.pop())
    ratios: dict[str, list[float]] = {name: [] for name in names}
    for moment in moments:
        ordered = sorted(logs[name][moment] for name in names)
        for name in names:
            value = logs[name][moment]
            ratios[name].append(value - _median_without(ordered, value))
    shares = {name: median(values) for name, values in ratios.items()}
    ordered = sorted(shares.values())
    slow, visible = [], FLOOR
    for name in names:
        count = len(ratios[name])
        error = (1 + FEW / count) * _deviation(ratios[name]) * math.sqrt(math.pi / 2 / count)
        limit = max(FLOOR, NOISE * error)
        if len(names) > _FEWEST_OTHERS:
            others = list(ordered)
            others.remove(shares[name])
            limit = max(limit, NOISE * _deviation(others))
        visible = max(visible, limit)
        often = sum(ratio < -FLOOR / 2 for ratio in ratios[name]) >= MOST * count
        if often and (share := math.exp(shares[name])) < 1 - limit:
            slow.append(Slow(name, share))
    slow.sort(key=lambda each: (each.share, natural_key(each.name)))
    return Comparison(len(names), tuple(slow), min(1.0, visible))


def _median_without(ordered: Sequence[float], value: float) -> float:
    """Return the median of sorted values without one of them."""
    others, place = len(ordered) - 1, bisect_left(ordered, value)
    low, high = ((others - 1) // 2, others // 2)
    first, second = (ordered[index if index < place else index + 1] for index in (low, high))
    return (first + second) / 2


def _deviation(values: Sequence[float]) -> float:
    """Return the robust standard deviation of values."""
    middle = median(values)
    return _TO_SIGMA * median(abs(value - middle) for value in values)


def nodes_of(slow: Iterable[Slow], node_of: Mapping[str, str]) -> list[str]:
    """Return the nodes of slow peers, in natural order."""
    return sorted({node_of[each.name] for each in slow}, key=natural_key)


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
    half, found = len(circle) // 2, []
    for _ in range(len(circle) - 1):
        pairs = zip(circle[:half], reversed(circle[half:]), strict=True)
        found.append([(a, b) for a, b in pairs if a is not None and b is not None])
        circle[1:] = [circle[-1], *circle[1:-1]]
    return found


@dataclass(frozen=True)
class PairFindings:
    """What a sweep of pairs found: members that are slow with most partners, and other slow pairs."""

    members: tuple[Slow, ...]
    pairs: tuple[tuple[Pair, float], ...]

    def line(self, kind: str) -> str:
        """Return the result in a line; `kind` is what a member is, such as "node"."""
        parts = []
        if self.members:
            parts.append(f"slow with most partners: {', '.join(each.text for each in self.members[:_MOST_NAMED])}")
        if self.pairs:
            named = [f"{a} and {b} ({100 * (1 - share):.0f} % slower)" for (a, b), share in self.pairs]
            parts.append(f"slow pairs: {', '.join(named[:_MOST_NAMED])}")
        return "; ".join(parts) or f"no {kind} and no pair is slower than its peers"


def compare_pairs(samples: Mapping[Pair, Sequence[float]], *, better: Better = "higher") -> PairFindings:
    """Name slow members and slow pairs of a sweep.

    Args:
        samples: figures of each pair; the same number of each.
        better: as in `compare_peers`.

    Raises:
        ValueError: as `compare_peers`.
    """
    names = {"\0".join(pair): pair for pair in samples}
    found = compare_peers({name: samples[pair] for name, pair in names.items()}, better=better)
    shares = {names[each.name]: each.share for each in found.slow}
    degree: dict[str, int] = {}
    for pair in samples:
        for member in pair:
            degree[member] = degree.get(member, 0) + 1
    slow: list[Slow] = []
    left = dict(shares)
    while left:
        # The member with most slow pairs first: what it explains is not counted against its partners.
        of_member = {member: [share for pair, share in left.items() if member in pair] for member in degree}
        worst = max(of_member, key=lambda member: len(of_member[member]) / degree[member])
        if 2 * len(of_member[worst]) <= degree[worst] or len(of_member[worst]) < 2:
            break
        slow.append(Slow(worst, median(of_member[worst])))
        left = {pair: share for pair, share in left.items() if worst not in pair}
    pairs = sorted(left.items(), key=lambda item: item[1])
    return PairFindings(tuple(sorted(slow, key=lambda each: each.share)), tuple(pairs))
