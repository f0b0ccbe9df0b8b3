"""Nodes that differ from the others: "these 3 differ from the other 125"."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from zslurm.doctor.check import Check, Outcome
from zslurm.slurm.hostlist import compress, natural_key

_REMEDY = "make them the same, or exclude them"
_MOST_NAMED = 3


@dataclass(frozen=True)
class Inconsistency:
    """Something that should be the same on all nodes and is not.

    Attributes:
        what: such as `kernel`.
        values: the nodes that have each value.
        usual: the value of more than half of them; None where there is none.
    """

    what: str
    values: Mapping[str, tuple[str, ...]]
    usual: str | None

    @property
    def others(self) -> int:
        """How many nodes have the usual value."""
        return len(self.values[self.usual]) if self.usual is not None else 0


def find_inconsistent(outcomes: Mapping[str, Outcome]) -> list[Inconsistency]:
    """Return what differs between nodes; what a node could not read is not compared.

    Args:
        outcomes: of one check, by node.
    """
    found = []
    for what in dict.fromkeys(name for outcome in outcomes.values() for name in outcome.must_match):
        values: dict[str, list[str]] = {}
        for node in sorted(outcomes, key=natural_key):
            if (value := outcomes[node].must_match.get(what)) is not None:
                values.setdefault(value, []).append(node)
        if len(values) > 1:
            most = max(values, key=lambda value: len(values[value]))
            usual = most if 2 * len(values[most]) > sum(map(len, values.values())) else None
            found.append(Inconsistency(what, {value: tuple(nodes) for value, nodes in values.items()}, usual))
    return found


def inconsistent_nodes(check: Check, outcomes: Mapping[str, Outcome]) -> dict[str, list[Outcome]]:
    """Return outcomes of nodes that differ from most; and of all, without attribution, where no value is usual."""
    said: dict[str, list[Outcome]] = {}
    differing: dict[str, list[tuple[Inconsistency, str]]] = {}
    for item in find_inconsistent(outcomes):
        for value, nodes in item.values.items():
            for node in nodes:
                if item.usual is None:
                    said.setdefault(node, []).append(_undecided(check, item))
                elif value != item.usual:
                    differing.setdefault(node, []).append((item, value))
    groups: dict[tuple[str, ...], list[str]] = {}
    for node, found in differing.items():
        groups.setdefault(tuple(f"{item.what} is {value}, not {item.usual}" for item, value in found), []).append(
            node
        )
    for words, same in groups.items():
        others = min(item.others for item, _ in differing[same[0]])
        who = "this one differs" if len(same) == 1 else f"these {len(same)} differ"
        more = f"; and {len(words) - _MOST_NAMED} more" if len(words) > _MOST_NAMED else ""
        reason = f"{who} from the other {others}: {'; '.join(words[:_MOST_NAMED])}{more}"
        for node in same:
            said.setdefault(node, []).append(Outcome(check.inconsistent, reason, _REMEDY))
    return said


def _undecided(check: Check, item: Inconsistency) -> Outcome:
    listed = "; ".join(f"{value} on {compress(nodes)}" for value, nodes in item.values.items())
    return Outcome(
        check.inconsistent, f"{item.what} differs, and no value is usual: {listed}", _REMEDY, blames=False
    )


def unlike_here(check: Check, here: Outcome, outcomes: Mapping[str, Outcome]) -> dict[str, list[Outcome]]:
    """Return nodes that differ from this machine in what a check of both finds; either may be wrong."""
    found = {}
    for node, outcome in outcomes.items():
        differing = [
            f"{name} is {value}, here {here.must_match[name]}"
            for name, value in outcome.must_match.items()
            if value is not None and here.must_match.get(name) not in (None, value)
        ]
        if differing:
            remedy = "use one environment that all machines share"
            found[node] = [Outcome(check.inconsistent, "; ".join(differing), remedy, blames=False)]
    return found
