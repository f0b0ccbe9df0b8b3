"""What is wrong with the rails of one node."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence

from zslurm.checkpoint_tools.quantities import counted
from zslurm.cluster.rails.types import Kind, Problem, Rail, RailMap
from zslurm.config.spec import ClusterSection
from zslurm.hardware.facts import NodeFacts
from zslurm.hardware.nics import Nic
from zslurm.hardware.pairing import closeness


def problems(found: RailMap, facts: NodeFacts, cluster: ClusterSection, gid_index: int | None) -> list[Problem]:
    """Return what is wrong with a node's rails, what stops a rail first.

    `gid_index` is the one that the ranks will use; if it is None any of RoCE v2 will do.
    """
    nics, expected = {nic.device: nic for nic in facts.nics}, cluster.gpus_per_node
    listed: list[Problem] = []
    if expected and not facts.gpus:
        listed.append(Problem("unreadable", "no GPU can be seen in sysfs, so none can be checked"))
    elif len(facts.gpus) < expected:
        gpus_present = f"{len(facts.gpus)} of {counted(expected, 'GPU is', 'GPUs are')} there"
        listed.append(Problem("missing-gpu", gpus_present))
    for rail in found.rails:
        if not rail.nic:
            text = f"{_numbered(rail.gpus)} has no NIC near it on PCIe, as the others have"
            listed.append(Problem("no-near-nic", text, rail.index))
        elif fault := _fault_of_nic(rail, nics.get(rail.nic), gid_index, len(nics)):
            kind, text = fault
            listed.append(Problem(kind, f"rail {rail.index}: {rail.nic} {text}", rail.index, rail.nic))
    listed_nics = [nics[name] for name in cluster.nics if name in nics]
    for rail in found.rails:
        if nic := nics.get(rail.nic or ""):
            listed += (
                _of_pcie(rail, found.rails) if found.source == "pcie" else _of_order(rail, nic, listed_nics, facts)
            )
    listed += _of_rates(found)
    return sorted(listed, key=lambda problem: not problem.incomplete)


def _fault_of_nic(rail: Rail, nic: Nic | None, gid_index: int | None, n_nics: int) -> tuple[Kind, str] | None:
    if nic is None:
        return "missing-nic", f"is missing ({n_nics} RDMA devices are there)"
    if nic.state is None:
        return "unreadable", "does not show the state of its link"
    if nic.state != "ACTIVE":
        return "nic-down", f"is {nic.state} ({nic.physical_state})" if nic.physical_state else f"is {nic.state}"
    if nic.link_layer != "Ethernet":
        return None
    if not nic.gids:
        return "no-roce-v2", "has no GID: its interface has no address"
    if not any(gid.type for gid in nic.gids.values()):
        return "unreadable", "does not show the types of its GIDs"
    if rail.gid_index is None:
        return "no-roce-v2", "has no GID of RoCE v2"
    if gid_index is not None and rail.gid_index != gid_index:
        kind = nic.gids[gid_index].type if gid_index in nic.gids else "not set"
        return "no-roce-v2", f"has RoCE v2 at GID index {rail.gid_index}; index {gid_index} is {kind}"
    return None


def _of_pcie(rail: Rail, rails: Sequence[Rail]) -> Iterator[Problem]:
    """Problems of a pairing that was found by PCIe."""
    usual, _ = Counter(len(rail.gpus) for rail in rails if rail.nic).most_common(1)[0]
    if len(rail.gpus) > usual:
        text = f"rail {rail.index}: {_numbered(rail.gpus)} share {rail.nic}, as no others do"
        yield Problem("shared-nic", text, rail.index, rail.nic)
    if rail.near == "far":
        text = f"rail {rail.index}: PCIe does not show whose NIC {rail.nic} is; list cluster.nics in the profile"
        yield Problem("unreadable", text, rail.index, rail.nic)


def _of_order(rail: Rail, nic: Nic, known: Sequence[Nic], facts: NodeFacts) -> Iterator[Problem]:
    """GPUs whose NIC by the profile is farther on PCIe than another of the profile's."""
    gpus = {gpu.index: gpu for gpu in facts.gpus}
    for index in rail.gpus:
        nearest = max(known, key=lambda candidate: closeness(gpus[index], candidate))
        if closeness(gpus[index], nearest) > closeness(gpus[index], nic):
            text = f"GPU {index}: the profile has {rail.nic}, but {nearest.device} is closer on PCIe"
            yield Problem("permuted", text, rail.index, rail.nic)


def _of_rates(found: RailMap) -> Iterator[Problem]:
    active = [rail for rail in found.rails if rail.rate_gbps and rail.state == "ACTIVE"]
    fastest = max((rail.rate_gbps or 0.0 for rail in active), default=0.0)
    for rail in active:
        if rail.rate_gbps and rail.rate_gbps < fastest:
            text = f"rail {rail.index}: {rail.nic} runs at {rail.rate_gbps:g} Gb/s, others at {fastest:g}"
            yield Problem("slow", text, rail.index, rail.nic)


def _numbered(gpus: Sequence[int]) -> str:
    return f"GPU {gpus[0]}" if len(gpus) == 1 else f"GPUs {', '.join(map(str, gpus))}"
