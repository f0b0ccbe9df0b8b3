"""Who computes a microbatch again, and what the results show: pure functions of numbers that all ranks have.

Rank q computes its own microbatch, and in each further round the one of rank q - shift. So every microbatch is
computed by several ranks, and every rank is one of those that computed several microbatches:

    several nodes    the second rank is on another node, each node in turn; the third is on a further one
    one node         the same with its ranks, or with the groups of them that share sequences
    two ranks        there is no third: both compute the microbatch again
    one rank         computes it three times: errors that come and go are found, no device that is always wrong

The second round is made in every check, the others only if it disagrees with the first. No torch here.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Verdict:
    """What the rounds of a check show.

    Attributes:
        wrong: ranks whose result the majority contradicts.
        undecided: ranks whose microbatch has no result with a majority.
    """

    wrong: tuple[int, ...] = ()
    undecided: tuple[int, ...] = ()

    def node(self, local: int) -> int | None:
        """Return the node of `local` ranks that all wrong ranks are on; None unless it is one, without doubt."""
        nodes = {rank // local for rank in self.wrong}
        return nodes.pop() if len(nodes) == 1 and not self.undecided else None


def shifts_of(check: int, ranks: int, local: int, together: int) -> tuple[int, ...]:
    """Return the shift of each round after the first, of the check with this number.

    Args:
        check: number of the check, from 0.
        ranks: of the run.
        local: ranks of each node.
        together: ranks that share each sequence.
    """
    if ranks <= together:
        return 0, 0
    unit = local if ranks > local else together
    groups = ranks // unit
    if groups > 2:
        return unit * (1 + check % (groups - 1)), unit * (1 + (check + 1) % (groups - 1))
    if unit > together:
        return unit, unit + together
    return unit, 0, unit


def checked_within(ranks: int, local: int, together: int) -> int:
    """Return in how many checks every rank is compared with every other node, or every other rank of the node."""
    unit = local if ranks > local else together
    return max(1, ranks // unit - 1)


def agree(rounds: Sequence[Sequence[int]], shifts: Sequence[int]) -> bool:
    """Return whether all results of each microbatch are equal; `rounds[i][q]` is rank q's result of round i."""
    return all(len({digest for _, digest in _votes(rounds, shifts, q)}) == 1 for q in range(len(rounds[0])))


def judge(rounds: Sequence[Sequence[int]], shifts: Sequence[int]) -> Verdict:
    """Return which ranks the majority contradicts."""
    wrong: set[int] = set()
    undecided: list[int] = []
    for rank in range(len(rounds[0])):
        votes = _votes(rounds, shifts, rank)
        ((digest, count),) = Counter(digest for _, digest in votes).most_common(1)
        if 2 * count > len(votes):
            wrong.update(voter for voter, vote in votes if vote != digest)
        else:
            undecided.append(rank)
    return Verdict(tuple(sorted(wrong)), tuple(undecided))


def _votes(rounds: Sequence[Sequence[int]], shifts: Sequence[int], rank: int) -> list[tuple[int, int]]:
    """Return who computed the microbatch of `rank`, with what result."""
    voters = [(rank + shift) % len(rounds[0]) for shift in (0, *shifts)]
    return [(voter, results[voter]) for voter, results in zip(voters, rounds, strict=False)]
