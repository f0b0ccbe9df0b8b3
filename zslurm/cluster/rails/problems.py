"""What is wrong with the rails of one node."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from zslurm.checkpoint_tools.quantities import counted
from zslurm.cluster.rails.types import Kind, Problem, Rail, RailMap
from zslurm.config.spec import ClusterSection
from zslurm.hardware.facts import Nic, NodeFacts
from zslurm.hardware.pairing import closeness


def problems(
    found: RailMap, facts: NodeFacts, cluster: ClusterSection, gid_index: int | None = None
) -> list[Problem]:
    """What is wrong with a node's rails, what stops a rail first.

    Args:
        found: the node's map.
        facts: of the node.
        cluster: the profile.
        gid_index: GID index that the ranks will use; None: any of RoCE v2 will do.
    """
    nics = {nic.device: nic for nic in facts.nics}
    listed = _of_gpus(facts, cluster)
    for rail in found.rails:
        nic = nics.get(rail.nic or "")
        listed += _of_nic(rail, nic, gid_index, len(facts.nics)) if rail.nic else _without_nic(rail)
    listed += _of_pairing(found, facts, cluster)
    listed += _of_rates(found)
    return sorted(listed, key=lambda problem: not problem.incomplete)


def _of_gpus(facts: NodeFacts, cluster: ClusterSection) -> list[Problem]:
    expected = cluster.gpus_per_node
    if not facts.gpus:
        return [Problem("unreadable", "no GPU can be seen in sysfs, so none can be checked")] if expected else []
    if len(facts.gpus) < expected:
        return [Problem("missing-gpu", f"{len(facts.gpus)} of {counted(expected, 'GPU is', 'GPUs are')} there")]
    return []


def _without_nic(rail: Rail) -> list[Problem]:
    listed = _numbers("GPU", rail.gpus)
    return [Problem("no-near-nic", f"{listed} has no NIC near it on PCIe, as the others have", rail.index)]


def _of_nic(rail: Rail, nic: Nic | None, gid_index: int | None, n_nics: int) -> list[Problem]:
    def problem(kind: Kind, text: str) -> Problem:
        return Problem(kind, f"rail {rail.index}: {rail.nic} {text}", rail.index, rail.nic)

    if nic is None:
        return [problem("missing-nic", f"is missing ({n_nics} RDMA devices are there)")]
    if nic.state is None:
        return [problem("unreadable", "does not show the state of its link")]
    if nic.state != "ACTIVE":
        wire = f" ({nic.physical_state})" if nic.physical_state else ""
        return [problem("nic-down", f"is {nic.state}{wire}")]
    if nic.link_layer != "Ethernet":
        return []
    if not any(gid.type for gid in nic.gids.values()):
        return (
            [problem("unreadable", "does not show the types of its GIDs")]
            if nic.gids
            else [problem("no-roce-v2", "has no GID: its interface has no address")]
        )
    if rail.gid_index is None:
        return [problem("no-roce-v2", "has no GID of RoCE v2")]
    if gid_index is not None and rail.gid_index != gid_index:
        kind = nic.gids[gid_index].type if gid_index in nic.gids else "not set"
        return [problem("no-roce-v2", f"has RoCE v2 at GID index {rail.gid_index}; index {gid_index} is {kind}")]
    return []


def _of_pairing(found: RailMap, facts: NodeFacts, cluster: ClusterSection) -> list[Problem]:
    gpus, nics = {gpu.index: gpu for gpu in facts.gpus}, {nic.device: nic for nic in facts.nics}
    listed = []
    usual = Counter(len(rail.gpus) for rail in found.rails if rail.nic).most_common(1)
    for rail in found.rails:
        nic = nics.get(rail.nic or "")
        if found.source == "pcie" and nic and usual and len(rail.gpus) > usual[0][0]:
            text = f"rail {rail.index}: {_numbers('GPU', rail.gpus)} share {rail.nic}, as no others do"
            listed.append(Problem("shared-nic", text, rail.index, rail.nic))
        if found.source == "pcie" and nic and rail.near == "far":
            text = (
                f"rail {rail.index}: PCIe does not show whose NIC {rail.nic} is; list cluster.nics in the profile"
            )
            listed.append(Problem("unreadable", text, rail.index, rail.nic))
        for index in rail.gpus if found.source == "profile" and nic else ():
            known = [nics[name] for name in cluster.nics if name in nics]
            nearest = max(known, key=lambda other: closeness(gpus[index], other))
            if nic and closeness(gpus[index], nearest) > closeness(gpus[index], nic):
                text = f"GPU {index}: the profile says {rail.nic}, but {nearest.device} is closer on PCIe"
                listed.append(Problem("permuted", text, rail.index, rail.nic))
    return listed


def _of_rates(found: RailMap) -> list[Problem]:
    rates = [rail.rate_gbps for rail in found.rails if rail.rate_gbps and rail.state == "ACTIVE"]
    return [
        Problem(
            "slow",
            f"rail {rail.index}: {rail.nic} runs at {rail.rate_gbps:g} Gb/s, others at {max(rates):g}",
            rail.index,
            rail.nic,
        )
        for rail in found.rails
        if rail.state == "ACTIVE" and rail.rate_gbps and rail.rate_gbps < max(rates)
    ]


def _numbers(word: str, numbers: Sequence[int]) -> str:
    return f"{word} {numbers[0]}" if len(numbers) == 1 else f"{word}s {', '.join(map(str, numbers))}"
