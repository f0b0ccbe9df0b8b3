"""Nodes that differ from the others: "these 3 differ from the other 125"."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from zslurm.doctor.check import Check, Outcome
from zslurm.slurm.hostlist import compress, natural_key

_REMEDY = "have them made alike, or exclude them"
_MOST_NAMED = 3


@dataclass(frozen=True)
class Drift:
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


def find_drifts(outcomes: Mapping[str, Outcome]) -> list[Drift]:
    """What differs between nodes; what a node could not read is not compared.

    Args:
        outcomes: of one check, by node.
    """
    found = []
    for what in dict.fromkeys(name for outcome in outcomes.values() for name in outcome.alike):
        values: dict[str, list[str]] = {}
        for node in sorted(outcomes, key=natural_key):
            if (value := outcomes[node].alike.get(what)) is not None:
                values.setdefault(value, []).append(node)
        if len(values) > 1:
            most = max(values, key=lambda value: len(values[value]))
            usual = most if 2 * len(values[most]) > sum(map(len, values.values())) else None
            found.append(Drift(what, {value: tuple(nodes) for value, nodes in values.items()}, usual))
    return found


def drifted(check: Check, outcomes: Mapping[str, Outcome]) -> dict[str, list[Outcome]]:
    """What is said of nodes that differ from most; and of all where no value is usual, which blames nobody."""
    said: dict[str, list[Outcome]] = {}
    differing: dict[str, list[tuple[Drift, str]]] = {}
    for drift in find_drifts(outcomes):
        for value, nodes in drift.values.items():
            for node in nodes:
                if drift.usual is None:
                    said.setdefault(node, []).append(_undecided(check, drift))
                elif value != drift.usual:
                    differing.setdefault(node, []).append((drift, value))
    groups: dict[tuple[str, ...], list[str]] = {}
    for node, found in differing.items():
        groups.setdefault(
            tuple(f"{drift.what} is {value}, not {drift.usual}" for drift, value in found), []
        ).append(node)
    for words, alike in groups.items():
        others = min(drift.others for drift, _ in differing[alike[0]])
        who = "this one differs" if len(alike) == 1 else f"these {len(alike)} differ"
        more = f"; and {len(words) - _MOST_NAMED} more" if len(words) > _MOST_NAMED else ""
        reason = f"{who} from the other {others}: {'; '.join(words[:_MOST_NAMED])}{more}"
        for node in alike:
            said.setdefault(node, []).append(Outcome(check.drift, reason, _REMEDY))
    return said


def _undecided(check: Check, drift: Drift) -> Outcome:
    listed = "; ".join(f"{value} on {compress(nodes)}" for value, nodes in drift.values.items())
    return Outcome(check.drift, f"{drift.what} differs, and no value is usual: {listed}", _REMEDY, blames=False)


def unlike_here(check: Check, here: Outcome, outcomes: Mapping[str, Outcome]) -> dict[str, list[Outcome]]:
    """Nodes that differ from this machine in what a check of both finds: nobody knows which of them is wrong."""
    found = {}
    for node, outcome in outcomes.items():
        differing = [
            f"{name} is {value}, here {here.alike[name]}"
            for name, value in outcome.alike.items()
            if value is not None and here.alike.get(name) not in (None, value)
        ]
        if differing:
            remedy = "use one environment that all machines share"
            found[node] = [Outcome(check.drift, "; ".join(differing), remedy, blames=False)]
    return found
