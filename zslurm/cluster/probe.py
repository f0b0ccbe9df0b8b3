"""Ask one compute node what a login node cannot know: NICs, rails, drivers, limits, ROCm.

The node runs `python -m zslurm.hardware.facts` once, in a short separate job. What is found becomes values of the
profile; what has no field becomes comments.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

from zslurm.checkpoint_tools.quantities import show_bytes
from zslurm.cluster.rails.map import rail_map
from zslurm.cluster.rails.types import RailMap
from zslurm.cluster.rccl.rules import BUILT_IN_ROCM, PLUGIN, ROCE, Network, Transport, in_range, rules, version
from zslurm.config.spec import ClusterSection
from zslurm.core.errors import SlurmRefused
from zslurm.hardware.facts import NodeFacts, from_json
from zslurm.hardware.gpus import Gpu
from zslurm.hardware.pairing import nearest
from zslurm.slurm.hostlist import compress_ranges
from zslurm.slurm.on_nodes.run_on_nodes import run_on_nodes

_DRIVERS: dict[str, Network] = {"ionic": "pollara", "bnxt_en": "broadcom", "mlx5_core": "cx7"}
# `AMD Instinct MI300X OAM`, `NVIDIA H100 80GB HBM3`
_MODEL = re.compile(r"\b(MI\d+\w*|(?:GB|GH|[ABHLV])\d+\w*)\b")
_FAMILY_BY_ID = {"1002:7408": "mi250x"}
"""Where the product's name has another: MI250X of HPE Cray EX are "AMD INSTINCT MI200 (MCM) OAM LC MBA HPE C2"."""
_SHIPPED: dict[tuple[Literal["amd", "nvidia"], Network], str] = {
    ("amd", "pollara"): "mi300x-pollara",
    ("amd", "broadcom"): "mi300x-broadcom",
    ("amd", "cx7"): "mi300x-cx7",
    ("nvidia", "infiniband"): "h100-ib",
}

_NO_PLUGIN = (
    f"ROCm's lib has no {PLUGIN}, which RCCL before ROCm {BUILT_IN_ROCM} needs for Pollara: generic RDMA is used. "
    "With the plugin elsewhere (LD_LIBRARY_PATH), set ainic_transport: plugin."
)


@dataclass(frozen=True)
class Probe:
    """What a node answered, ready for a profile.

    Attributes:
        extends: the shipped profile for its GPUs and NICs; None if there is none.
        nics: RDMA devices in rail order; empty if they do not pair up with the GPUs.
        gpu_nics: empty if GPU i uses NIC i.
        notes: what else was found, a line each.
        gpu_numa: the NUMA node of each GPU; empty if some are unknown.
        rocm_version: of the node.
        ainic_transport: only if ROCm's version does not imply it.
        peermem: see `NodeFacts`.
        scontrol: whether jobs find scontrol on their nodes; None is unknown.
        unknown_nics: whether the node has NICs, and the RCCL rules know the driver of none.
        interface: the first one of Slingshot, on which ranks can meet; None on other networks.
        traffic_class: the lossless one, if all NICs that show theirs have the same.
    """

    extends: str | None
    network: Network | None
    gpu_family: str | None
    gpus: int
    nics: tuple[str, ...]
    gpu_nics: tuple[int, ...]
    gid_index: int | None
    rccl_version: str | None
    notes: tuple[str, ...]
    gpu_numa: tuple[int, ...] = ()
    rocm_version: str | None = None
    ainic_transport: Transport | None = None
    peermem: bool | None = None
    scontrol: bool | None = None
    unknown_nics: bool = False
    traffic_class: int | None = None
    interface: str | None = None

    @property
    def not_found(self) -> tuple[str, ...]:
        """Return what the node's answer leaves open of what a run on GPUs needs, in words of the profile."""
        if not self.gpus:
            return ()
        missing = {
            "network": self.network is None,
            "nics": not self.nics and self.network != "slingshot",
            "gid_index": self.gid_index is None and self.network in ROCE,
            "gpu_family": self.gpu_family is None,
            "gpu_numa": not self.gpu_numa,
            "rocm_version": self.rocm_version is None and self.extends != "h100-ib",
        }
        return tuple(f"cluster.{key}" for key, is_missing in missing.items() if is_missing)


def probe(options: Sequence[str], timeout_s: float, waiting: Callable[[str], None] = lambda job_id: None) -> Probe:
    """Read one node, in a job with these options of srun; `timeout_s` includes its wait in the queue.

    `waiting` is called again and again with the job's id while the job waits.

    Raises:
        SlurmUnavailable: no srun, or no answer from the controller.
        SlurmRefused: the node could not be asked, or its answer is none.
    """
    (answer,) = run_on_nodes(
        "zslurm.hardware.facts", count=1, options=options, timeout_s=timeout_s, waiting=waiting
    ).values()
    if answer.error is not None:
        raise SlurmRefused(f"{answer.node} could not be asked: {answer.error}")
    try:
        return probe_of(from_json(answer.value))
    except ValueError as error:
        raise SlurmRefused(f"{answer.node}: its answer is not what this version of zslurm asks for") from error


def probe_of(facts: NodeFacts) -> Probe:
    """Return what the facts of a node mean for the profile of its cluster."""
    network = _network(facts)
    family = _family(facts)
    rails = rail_map(facts, ClusterSection(network=network))
    nics, gpu_nics, trouble = _pairing(facts, rails)
    kinds = {gpu.kind for gpu in facts.gpus}
    extends = _SHIPPED.get((kinds.pop(), network)) if len(kinds) == 1 and network else None
    if extends is not None and family is not None and not extends.startswith(family):
        extends = None  # another GPU: the rules need no more than its family and the network
    rocm = ".".join(str(number) for number in version(facts.rocm or "")) or None
    missing = _plugin_is_missing(facts, network, rocm)
    numa = tuple(gpu.numa for gpu in facts.gpus if gpu.numa is not None)
    indexes = Counter(rail.gid_index for rail in rails.rails if rail.gid_index is not None)
    return Probe(
        extends=extends,
        network=network,
        gpu_family=family,
        gpus=len(facts.gpus),
        nics=nics,
        gpu_nics=gpu_nics,
        gid_index=indexes.most_common(1)[0][0] if indexes and network != "infiniband" else None,
        rccl_version=rules().rccl_of(facts.rocm),
        notes=(*_notes(facts), *trouble, *([_NO_PLUGIN] if missing else [])),
        gpu_numa=numa if len(numa) == len(facts.gpus) else (),
        rocm_version=rocm,
        ainic_transport="generic" if missing else None,
        peermem=facts.peermem if network is not None else None,
        scontrol=facts.scontrol,
        unknown_nics=network is None and any(nic.pci and nic.driver for nic in facts.nics),
        interface=next(iter(sorted(name for nic in facts.cxi for name in nic.netdevs)), None),
        traffic_class=classes.pop() if len(classes := set(facts.traffic_classes.values())) == 1 else None,
    )


def _plugin_is_missing(facts: NodeFacts, network: Network | None, rocm: str | None) -> bool:
    """Return whether RCCL needs a plugin for the node's NICs that is not there."""
    needs = network == "pollara" and rocm is not None and not in_range(rocm, f">={BUILT_IN_ROCM}")
    return needs and not facts.anp and any(gpu.kind == "amd" for gpu in facts.gpus)


def _network(facts: NodeFacts) -> Network | None:
    """By the driver that most of the hardware NICs have; Slingshot's are of a class of their own."""
    hardware = [nic for nic in facts.nics if nic.pci and nic.driver in _DRIVERS]
    if not hardware:
        return "slingshot" if facts.cxi else None
    driver, _ = Counter(str(nic.driver) for nic in hardware).most_common(1)[0]
    network = _DRIVERS[driver]
    links = Counter(nic.link_layer for nic in hardware if nic.driver == driver)
    return "infiniband" if network == "cx7" and links.most_common(1)[0][0] == "InfiniBand" else network


def _family(facts: NodeFacts) -> str | None:
    models = {_family_of(gpu) for gpu in facts.gpus} - {None}
    return models.pop() if len(models) == 1 else None


def _family_of(gpu: Gpu) -> str | None:
    if (known := _FAMILY_BY_ID.get(gpu.pci_id or "")) is not None:
        return known
    match = _MODEL.search(gpu.model or "")
    return match[1].lower() if match else None


def _pairing(facts: NodeFacts, rails: RailMap) -> tuple[tuple[str, ...], tuple[int, ...], list[str]]:
    """NICs in rail order and the NIC of each GPU, and what is wrong with them; no NICs if some GPU has none."""
    trouble = [f"On {facts.node}: {problem.message}." for problem in rails.problems if problem.incomplete]
    named = [rail for rail in rails.rails if rail.nic is not None]
    of_gpu = {gpu: index for index, rail in enumerate(named) for gpu in rail.gpus}
    if not facts.gpus or not named:
        return (), (), trouble
    if any(gpu.index not in of_gpu for gpu in facts.gpus):
        return (), (), [*trouble, "So cluster.nics is left out: probe a whole node, or write it by hand."]
    order = tuple(of_gpu[gpu.index] for gpu in facts.gpus)
    return tuple(str(rail.nic) for rail in named), () if order == tuple(range(len(named))) else order, trouble


def _notes(facts: NodeFacts) -> list[str]:
    models = Counter(gpu.model or f"{gpu.kind} GPU" for gpu in facts.gpus)
    gpus = ", ".join(f"{count} x {model}" for model, count in models.items()) or "no GPUs"
    notes = [f"Probed {facts.node}: {gpus}."]
    drivers = Counter((nic.driver, nic.firmware) for nic in (*facts.nics, *facts.cxi) if nic.pci)
    notes += [
        f"NICs: {count} x {driver or 'unknown driver'}, firmware {firmware or 'unknown'}."
        for (driver, firmware), count in drivers.items()
    ]
    notes += _slingshot_notes(facts)
    versions = [("ROCm", facts.rocm), ("NVIDIA driver", facts.nvidia_driver), ("kernel", facts.kernel)]
    versions_known = [f"{name} {version}" for name, version in versions if version]
    notes += [f"{', '.join(versions_known)}."] if versions_known else []
    if facts.memlock is not None:
        few = facts.memlock != "unlimited"
        limit = f"{show_bytes(int(facts.memlock))}; RDMA needs unlimited" if few else "unlimited"
        notes.append(f"memlock inside a job: {limit}.")
    return notes


def _slingshot_notes(facts: NodeFacts) -> list[str]:
    """Return which GPUs are next to which NIC of Slingshot, as libfabric and its plugin choose them."""
    if not facts.cxi or not facts.gpus:
        return []
    nics = nearest(facts.gpus, facts.cxi)
    of_nic = {nic.device: [gpu.index for gpu in facts.gpus if nics.get(gpu.index) == nic] for nic in facts.cxi}
    pairs = [f"{name}: {compress_ranges(indexes)}" for name, indexes in of_nic.items() if indexes]
    alone = [gpu.index for gpu in facts.gpus if gpu.index not in nics]
    notes = [f"GPUs in the NUMA domain of each NIC: {', '.join(pairs)}."] if pairs else []
    return notes + ([f"No NIC is in the NUMA domain of GPUs {compress_ranges(alone)}."] if alone else [])
