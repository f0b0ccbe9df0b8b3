"""Nodes that differ from the others: "these 3 differ from the other 125"."""

from __future__ import annotations

from collections.abc import Mapping

from zslurm.doctor.check import Check, CheckOutcome
from zslurm.slurm.hostlist import compress, natural_key

_REMEDY = "make them the same, or exclude them"
_MOST_NAMED = 3


def inconsistent_nodes(check: Check, outcomes: Mapping[str, CheckOutcome]) -> dict[str, list[CheckOutcome]]:
    """Return outcomes of nodes that differ from most; and of all, without attribution, if no value is usual.

    What a node could not read is not compared.
    """
    by_node: dict[str, list[CheckOutcome]] = {}
    differing: dict[str, list[tuple[str, int]]] = {}  # node -> how it differs, and from how many
    for name in dict.fromkeys(name for outcome in outcomes.values() for name in outcome.must_match):
        nodes_of: dict[str, list[str]] = {}
        for node in sorted(outcomes, key=natural_key):
            if (value := outcomes[node].must_match.get(name)) is not None:
                nodes_of.setdefault(value, []).append(node)
        if len(nodes_of) < 2:
            continue
        usual = max(nodes_of, key=lambda value: len(nodes_of[value]))
        others, in_all = len(nodes_of[usual]), sum(map(len, nodes_of.values()))
        if 2 * others > in_all:
            for value in nodes_of.keys() - {usual}:
                for node in nodes_of[value]:
                    differing.setdefault(node, []).append((f"{name} is {value}, not {usual}", others))
        else:
            listed = "; ".join(f"{value} on {compress(nodes)}" for value, nodes in nodes_of.items())
            reason = f"{name} differs, and no value is usual: {listed}"
            for node in (node for nodes in nodes_of.values() for node in nodes):
                by_node.setdefault(node, []).append(
                    CheckOutcome(check.inconsistent, reason, _REMEDY, node_fault=False)
                )
    groups: dict[tuple[tuple[str, int], ...], list[str]] = {}
    for node, differences in differing.items():
        groups.setdefault(tuple(differences), []).append(node)
    for group, nodes in groups.items():
        which = "this one differs" if len(nodes) == 1 else f"these {len(nodes)} differ"
        listed = "; ".join(difference for difference, _ in group[:_MOST_NAMED])
        more = f"; and {len(group) - _MOST_NAMED} more" if len(group) > _MOST_NAMED else ""
        reason = f"{which} from the other {min(others for _, others in group)}: {listed}{more}"
        for node in nodes:
            by_node.setdefault(node, []).append(CheckOutcome(check.inconsistent, reason, _REMEDY))
    return by_node


def unlike_here(
    check: Check, here: CheckOutcome, outcomes: Mapping[str, CheckOutcome]
) -> dict[str, list[CheckOutcome]]:
    """Return nodes that differ from this machine in what a check of both finds; either may be wrong."""
    by_node = {}
    for node, outcome in outcomes.items():
        differing = [
            f"{name} is {value}, here {here.must_match[name]}"
            for name, value in outcome.must_match.items()
            if value is not None and here.must_match.get(name) not in (None, value)
        ]
        if differing:
            remedy = "use one environment that all machines share"
            by_node[node] = [CheckOutcome(check.inconsistent, "; ".join(differing), remedy, node_fault=False)]
    return by_node
