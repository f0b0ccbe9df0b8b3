"""What a result shows besides its figures: which GPU, rail, node or pair is slower than its peers.

It needs no torch, so a result that is not complete, or was read from a file, is looked at in the same way.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from statistics import mean, median
from typing import Any

from zslurm.bench.result import BenchResult, MeasuredMachine
from zslurm.bench.results.peers import Pair, PeerComparison, Slow, compare_peers, exclude_line, slow_pairs
from zslurm.checkpoint_tools.quantities import counted

Row = dict[str, Any]


@dataclass(frozen=True)
class Findings:
    """What was found.

    Attributes:
        lines: for the user, a sentence each.
        slow: names of what is slow.
        nodes: those to leave out.
    """

    lines: tuple[str, ...] = ()
    slow: tuple[str, ...] = ()
    nodes: tuple[str, ...] = ()


def add_findings(result: BenchResult) -> None:
    """Look at the rows, and write into the result what they show."""
    look = _OF_BENCHMARK.get(result.benchmark)
    if look is None:
        return
    findings = look(result.rows, result.machine)
    result.findings, result.slow, result.exclude = list(findings.lines), list(findings.slow), list(findings.nodes)


def of_collectives(rows: Sequence[Row], machine: MeasuredMachine) -> Findings:
    """Name GPUs and nodes that are slow with all partners, and slow pairs of others."""
    lines: list[str] = []
    slow: list[str] = []
    nodes: list[str] = []
    for scope, kind in (("gpu_pair", "GPU" if machine.device == "cuda" else "rank"), ("node_pair", "node")):
        of_scope: dict[str, dict[Pair, list[float]]] = {}
        for row in rows:
            if row.get("scope") == scope and not row["wrong"]:
                environment = str(row.get("environment", ""))
                of_scope.setdefault(environment, {})[_names(row, machine)] = row["figures"]
        for environment, samples in of_scope.items():
            if scope == "node_pair":
                samples = _along_all_rails(samples)
            of_pairs = _of_pairs(samples, kind, f" ({environment})" if environment else "")
            lines += of_pairs.lines
            slow += of_pairs.slow
            nodes += of_pairs.nodes
    for group in _by_own_time(rows, machine):
        lines += group.lines
        slow += group.slow
        nodes += group.nodes
    nodes = [name for name in machine.nodes if name in nodes]
    if nodes and len(machine.nodes) > 1:
        lines.append(f"to leave the slow out: {exclude_line(nodes)}")
    return Findings(tuple(lines), tuple(dict.fromkeys(slow)), tuple(nodes))


def _by_own_time(rows: Sequence[Row], machine: MeasuredMachine) -> Iterator[Findings]:
    """Compare ranks on CPUs by the processor time that they took for exchanges with all others."""
    by_environment: dict[str, dict[Pair, Sequence[Sequence[float]]]] = {}
    for row in rows:
        if "own_s" in row and not row["wrong"]:
            by_environment.setdefault(str(row.get("environment", "")), {})[_names(row, machine)] = row["own_s"]
    for environment, of_pairs in by_environment.items():
        compared = compare_own_time(of_pairs)
        under = f" ({environment})" if environment else ""
        names = tuple(peer.name for peer in compared.slow)
        line = f"processor time of ranks{under}: {compared.line('rank')}"
        yield Findings((line,), names, tuple(name.split(" ")[0] for name in names))


def _of_pairs(samples: dict[Pair, list[float]], kind: str, under: str) -> Findings:
    """Name members, rails and pairs of one sweep.

    A slow rail is named by itself, and its nodes are compared with each other there: what makes all of them slow
    is no fault of theirs.
    """
    members = compare_members(samples)
    if not members.peers:
        why = "not compared, as some of them are missing or got wrong data"
        return Findings((f"pairs of {kind}s{under}: {why}",))
    rails = _slow_rails(samples)
    if not rails:
        comparisons, lines = [(samples, members)], [f"pairs of {kind}s{under}: {members.line(kind)}"]
    else:
        groups = [
            {pair: values for pair, values in samples.items() if _rail(pair[0]) == rail} for rail in sorted(rails)
        ]
        if outside_rails := {pair: values for pair, values in samples.items() if _rail(pair[0]) not in rails}:
            groups.append(outside_rails)
        comparisons, lines = [(group, compare_members(group)) for group in groups], []
        for rail, share in sorted(rails.items()):
            slower = f"{100 * (1 - share):.0f} % slower between all {kind}s"
            lines.append(f"slow rail{under}: {rail} is {slower}; look at its switches and cables")
        slow = [peer for _, compared in comparisons for peer in compared.slow]
        if slow:
            lines.append(f"pairs of {kind}s{under}: slower than the others of their rail: {_listed(slow)}")
    names = [peer.name for _, compared in comparisons for peer in compared.slow]
    for group, _ in comparisons:
        others = {pair: values for pair, values in group.items() if not set(names) & set(pair)}
        for (a, b), share in slow_pairs(others) if others else ():
            lines.append(f"slow pair{under}: {a} and {b} ({100 * (1 - share):.0f} % slower)")
    return Findings(tuple(lines), (*sorted(rails), *names), tuple(name.split(" ")[0] for name in names))


def _listed(slow: Sequence[Slow]) -> str:
    return ", ".join(peer.text for peer in slow)


def _rail(name: str) -> str:
    """Return the rail in a name such as `node3 rail 5`; nothing if there is one rail."""
    return name.partition(" ")[2]


def _slow_rails(samples: Mapping[Pair, Sequence[float]]) -> dict[str, float]:
    """Return the rails that are slower than others, each with its share of their rate; none if there is one.

    A rail's rate at a moment is what two of its median member would have together, so that one slow node does not
    make a rail slow.
    """
    of_rail: dict[str, list[list[float]]] = {}
    for name, figures in member_rates(samples).items():
        of_rail.setdefault(_rail(name), []).append(figures)
    if len(of_rail) < 2 or not all(rail.startswith("rail ") for rail in of_rail):
        return {}
    rates = {
        rail: [median(moment) ** 2 for moment in zip(*members, strict=True)] for rail, members in of_rail.items()
    }
    return {peer.name: peer.share for peer in compare_peers(rates).slow}


def of_mlp(rows: Sequence[Row], machine: MeasuredMachine) -> Findings:
    """Return what all ranks did together, and name those that are slow."""
    rates = [row["tflops"] for row in rows]
    if not rates:
        return Findings()
    kind = "GPU" if machine.device == "cuda" else "rank"
    compared = compare_peers({row["where"]: row["moments_s"] for row in rows}, better="lower")
    slow = [peer.name for peer in compared.slow]
    nodes = list(dict.fromkeys(row["node"] for row in rows if row["where"] in slow))
    peer = f"{min(rates):.4g} to {max(rates):.4g} each"
    lines = [
        f"{counted(len(rows), kind)} at once: {sum(rates):.4g} TFLOPS in all, {peer}",
        compared.line(kind),
    ]
    if nodes and len(machine.nodes) > 1:
        lines.append(f"to leave the slow out: {exclude_line(nodes)}")
    return Findings(tuple(lines), tuple(slow), tuple(nodes))


def compare_members(samples: Mapping[Pair, Sequence[float]]) -> PeerComparison:
    """Compare the members of pairs by what each adds to the rates of its pairs."""
    return compare_peers(member_rates(samples))


def compare_own_time(of_pairs: Mapping[Pair, Sequence[Sequence[float]]]) -> PeerComparison:
    """Compare members by their own times in their pairs, of which the mean counts at each moment."""
    of_member: dict[str, list[Sequence[float]]] = {}
    for pair, of_two in of_pairs.items():
        for name, times in zip(pair, of_two, strict=True):
            of_member.setdefault(name, []).append(times)
    means = {name: [mean(moment) for moment in zip(*pairs, strict=True)] for name, pairs in of_member.items()}
    return compare_peers(means, better="lower")


def member_rates(samples: Mapping[Pair, Sequence[float]]) -> dict[str, list[float]]:
    """Return each member's part in the rates of its pairs, moment by moment.

    The logarithm of a pair's rate is taken as the sum of its two members' parts, m_a + m_b. If all n members
    of a group exchange with each other, least squares give m_a = (S_a - T / (n - 1)) / (n - 2), S_a being the sum
    over its pairs and T that over all. A member that makes all its pairs slower is slower by as much, and its
    partners are not; each figure is of n - 1 measurements. Only ratios of the figures mean something.

    Args:
        samples: rates of the pairs of one group, or of several that have no pair in common.
    """
    groups: dict[str, set[str]] = {}
    for a, b in samples:
        together = groups.get(a, {a}) | groups.get(b, {b})
        groups |= dict.fromkeys(together, together)
    moments = min((len(figures) for figures in samples.values()), default=0)
    rates_by_member: dict[str, list[float]] = {}
    for group in dict.fromkeys(map(frozenset, groups.values())):
        n = len(group)
        inside = {pair: figures for pair, figures in samples.items() if set(pair) <= group}
        if n < 3 or len(inside) < n * (n - 1) // 2:  # a pair gave wrong data: what its members add is not known
            continue
        for moment in range(moments):
            sums = dict.fromkeys(group, 0.0)
            for pair, figures in inside.items():
                for member in pair:
                    sums[member] += math.log(figures[moment])
            total = sum(sums.values()) / 2
            for member, of_member in sums.items():
                log_rate = (of_member - total / (n - 1)) / (n - 2)
                rates_by_member.setdefault(member, []).append(math.exp(log_rate))
    return rates_by_member


def _names(row: Row, machine: MeasuredMachine) -> Pair:
    """Return what the two of a pair are called: `node3 GPU 5`, or `node3 rail 5`."""
    word = "rail" if row["scope"] == "node_pair" else "GPU" if machine.device == "cuda" else "rank"
    first, second = (divmod(rank, machine.ranks_per_node) for rank in row["pair"])
    return f"{machine.nodes[first[0]]} {word} {first[1]}", f"{machine.nodes[second[0]]} {word} {second[1]}"


def _along_all_rails(samples: dict[Pair, list[float]]) -> dict[Pair, list[float]]:
    """Return the pairs of nodes on each rail; if there is only one rail, by the nodes' names."""
    if len({pair[0].rpartition(" ")[2] for pair in samples}) > 1:
        return samples
    return {(a.split(" ")[0], b.split(" ")[0]): values for (a, b), values in samples.items()}


_OF_BENCHMARK: dict[str, Callable[[Sequence[Row], MeasuredMachine], Findings]] = {
    "collectives": of_collectives,
    "mlp": of_mlp,
}
"""By name of the benchmark; one that is not here finds nothing."""
