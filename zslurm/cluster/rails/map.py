"""The rails of a node: which GPU sends through which NIC.

GPU i and NIC i of every node hang on one switch plane, rail i. What makes this work is that the same local rank
uses the same GPU and, on it, the same NIC on every node. RCCL and NCCL choose the NIC by PCIe distance among those
that NCCL_IB_HCA lets through: that list filters, it does not order. So a map comes from the profile if the
profile knows the rails (`nics`, `gpu_nics`), and is then compared with PCIe; else only from PCIe.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from zslurm.cluster.rails.problems import problems
from zslurm.cluster.rails.types import Rail, RailMap
from zslurm.cluster.rccl.environment import variables_of
from zslurm.config.spec import ClusterSection
from zslurm.hardware.facts import NodeFacts
from zslurm.hardware.gpus import Gpu
from zslurm.hardware.nics import Nic
from zslurm.hardware.pairing import common_path, near, pair

_ROCE_V2 = "RoCE v2"
# The kernel drivers of the rails' cards, where the profile names the cards.
_DRIVERS = {"pollara": "ionic", "broadcom": "bnxt_en", "cx7": "mlx5_core", "infiniband": "mlx5_core"}


def rail_map(facts: NodeFacts, cluster: ClusterSection) -> RailMap:
    """Return the rails of a node and their problems."""
    gid_index = _gid_index(cluster)
    make = _by_profile if cluster.nics else _by_pcie
    rails = tuple(make(facts, cluster, gid_index))
    used = {rail.nic for rail in rails}
    drafted = RailMap(
        node=facts.node,
        source="profile" if cluster.nics else "pcie",
        rails=rails,
        others=tuple(nic.device for nic in facts.nics if nic.device not in used),
    )
    return replace(drafted, problems=tuple(problems(drafted, facts, cluster, gid_index)))


def _gid_index(cluster: ClusterSection) -> int | None:
    """Return the index that jobs on this cluster are given, by the rules or the profile."""
    variables = variables_of(cluster)
    index = variables.get("NCCL_IB_GID_INDEX", "")
    return int(index) if index.isdecimal() else cluster.gid_index


def candidates(facts: NodeFacts, cluster: ClusterSection) -> list[Nic]:
    """NICs that may be a rail's: hardware, of the profile's kind, and neither management nor storage."""
    reserved = {cluster.interface, cluster.storage_interface} - {None}
    hardware = [nic for nic in facts.nics if nic.pci and not reserved & set(nic.netdevs)]
    driver = _DRIVERS.get(cluster.network or "")
    if driver is None or not any(nic.driver for nic in hardware):
        return hardware
    return [nic for nic in hardware if nic.driver == driver]


def _by_profile(facts: NodeFacts, cluster: ClusterSection, gid_index: int | None) -> list[Rail]:
    """Return one rail for each NIC of the profile, in its order."""
    nics = {nic.device: nic for nic in facts.nics}
    gpus: dict[int | None, list[Gpu]] = {}
    for gpu in facts.gpus:
        gpus.setdefault(_rail_of_gpu(gpu, cluster), []).append(gpu)
    return [
        _rail(index, gpus.get(index, []), nics.get(name), gid_index, name)
        for index, name in enumerate(cluster.nics)
    ]


def _rail_of_gpu(gpu: Gpu, cluster: ClusterSection) -> int | None:
    if not cluster.gpu_nics:
        return gpu.index
    return cluster.gpu_nics[gpu.index] if gpu.index < len(cluster.gpu_nics) else None


def _by_pcie(facts: NodeFacts, cluster: ClusterSection, gid_index: int | None) -> list[Rail]:
    """Return one rail for each NIC that GPUs use and for each GPU without one, in the order of the GPUs."""
    paired = pair(facts.gpus, candidates(facts, cluster))
    groups: dict[str, list[Gpu]] = {}
    for gpu in facts.gpus:
        nic = paired.get(gpu.index)
        groups.setdefault(nic.device if nic else f"gpu {gpu.index}", []).append(gpu)
    return [_rail(index, gpus, paired.get(gpus[0].index), gid_index) for index, gpus in enumerate(groups.values())]


def _rail(
    index: int, gpus: Sequence[Gpu], nic: Nic | None, gid_index: int | None, name: str | None = None
) -> Rail:
    first = gpus[0] if gpus else None
    both = (first, nic) if first and nic else None
    shared = common_path(*both) if both else ()
    return Rail(
        index=index,
        gpus=tuple(gpu.index for gpu in gpus),
        gpu_pci=tuple(gpu.pci for gpu in gpus),
        nic=nic.device if nic else name,
        nic_pci=nic.pci if nic else None,
        netdev=nic.netdevs[0] if nic and nic.netdevs else None,
        numa=nic.numa if nic else first.numa if first else None,
        near=near(*both) if both else None,
        bridge=shared[-1] if shared else None,
        state=nic.state if nic else None,
        rate_gbps=nic.rate_gbps if nic else None,
        gid_index=_roce_v2(nic, gid_index) if nic else None,
    )


def _roce_v2(nic: Nic, wanted: int | None) -> int | None:
    indexes = [index for index, gid in sorted(nic.gids.items()) if gid.type == _ROCE_V2]
    return wanted if wanted in indexes else indexes[0] if indexes else None
