"""The text of a cluster profile that `zslurm init` writes: values, and comments for what has no key."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from zslurm.checkpoint_tools.quantities import counted
from zslurm.config.yaml12 import plain_scalar
from zslurm.slurm.hostlist import compress
from zslurm.slurm.inventory import Node, SlurmPartition
from zslurm.slurm.settings import SlurmSettings
from zslurm.slurm.topology import SlurmTopology, usual_leaf_size

if TYPE_CHECKING:
    from zslurm.cluster.probe import Probe

_PLAIN = re.compile(r"[A-Za-z0-9][A-Za-z0-9_./+-]*")
_SHOWN_SWITCHES = 16
_FABRIC_LINES = (
    "  # fabric:                 # which nodes are on which leaf slice: ranks follow the shortest ring",
    "  #   slices:               # over them; cabling plans show it, no node knows it (docs/rails.md)",
    "  #     - {leaf: leaf0, rails: [0, 1], nodes: 'node[0-31]'}",
)


@dataclass(frozen=True)
class Members:
    """The nodes of a partition: how many, and what most of them are.

    Attributes:
        hidden: Slurm does not show its nodes to users: GPUs and CPUs are the partition's, divided by its nodes. No
            GPUs may then be GPUs that Slurm does not count.
        names: of the nodes that are alike.
        usable_cpus: those that jobs may ask for, if they are fewer than `cpus`.
    """

    n_nodes: int
    n_alike: int
    gpus: int
    gpu_type: str | None
    cpus: int
    hidden: bool = False
    names: tuple[str, ...] = field(default=(), compare=False)
    usable_cpus: int | None = None

    @classmethod
    def of(cls, partition: SlurmPartition, nodes: list[Node]) -> Members:
        """Count the nodes of a partition, and describe its most common kind of node."""
        return next(iter(cls.kinds(partition, nodes)), cls(0, 0, 0, None, 1))

    @classmethod
    def kinds(cls, partition: SlurmPartition, nodes: list[Node]) -> list[Members]:
        """Return the kinds of nodes of a partition by GPUs, their type, and CPUs; the most common one first."""
        members = [node for node in nodes if partition.name in node.partitions]
        counts = Counter(map(_kind, members))
        return [
            cls(len(members), count, *kind, names=tuple(node.name for node in members if _kind(node) == kind))
            for kind, count in counts.most_common()
        ]

    def __str__(self) -> str:
        gpus = f"{counted(self.gpus, 'GPU')}{f' ({self.gpu_type})' if self.gpu_type else ''}"
        return f"{compress(self.names)}: {gpus}, {counted(self.cpus, 'CPU')}"

    @classmethod
    def of_hidden(cls, partition: SlurmPartition) -> Members:
        """Describe the nodes of a partition if Slurm shows the partition but no nodes."""
        n_nodes = max(1, partition.n_nodes)
        gpus, cpus = (partition.gpus or 0) // n_nodes, max(1, partition.cpus // n_nodes)
        return cls(partition.n_nodes, partition.n_nodes, gpus, None, cpus, hidden=True)


def _kind(node: Node) -> tuple[int, str | None, int]:
    return node.gpus, node.gpu_type, node.cpus


def slurm_profile(
    name: str,
    partition: SlurmPartition,
    members: Members,
    settings: SlurmSettings,
    topology: SlurmTopology,
    account: str | None,
    found: Probe | None,
    not_probed: str | None = None,
    gpu_option: str = "gpus-per-node",
    others: Sequence[str] = (),
) -> str:
    """Return the text of a profile: values for the keys of zslurm, comments for what a person should know.

    `not_probed` is why no node was read, in one line. `gpu_option` is the form of request for GPUs
    that the site takes. `others` are lines on the nodes of other kinds.
    """
    limits = [
        f"time limit {partition.max_time}" if partition.max_time else "no time limit",
        *([f"{partition.default_time} if a job names none"] if partition.default_time else []),
        *([f"at most {counted(partition.max_nodes, 'node')} for a job"] if partition.max_nodes else []),
    ]
    lost, version = settings.lost_peer_s, settings.version or "?"
    if members.hidden and not members.gpus and found is not None:
        members = replace(members, gpus=found.gpus)
    lines = [
        f"# Cluster profile of zslurm, written by `zslurm init` from Slurm {version}. Edit it freely.",
        f"# Partition {partition.name}: {_described(members)}; {', '.join(limits)}.",
        *(_comment(note) for note in settings.notes()),
        *(_comment(line) for line in _topology_lines(topology)),
        *(_comment(note) for note in (found.notes if found else ())),
        *([_comment(f"The network is not known: {not_probed}.")] if not_probed else []),
        *(_comment(f"Nodes of another kind, which this profile does not describe: {line}") for line in others),
        "cluster:",
        *([f"  extends: {found.extends}"] if found and found.extends else []),
        f"  name: {scalar(name)}",
        "  launcher: slurm",
        _gpus_line(members),
        *([f"  gpu_type: {scalar(members.gpu_type)}"] if members.gpu_type else []),
        *([f"  gpu_option: {gpu_option}"] if gpu_option != "gpus-per-node" else []),
        _cpus_line(members),
        *_switch_lines(topology),
        *(_probed_lines(members, found) if found else _unprobed_lines(not_probed)),
        _interface_line(found),
        "  # setup:                  # shell lines that run in every job first",
        "  #   - module load rocm",
        "slurm:",
        f"  partition: {scalar(partition.name)}",
        f"  account: {scalar(account)}" if account else "  # account: my-account",
    ]
    if lost is not None:
        lines += [
            "aegis:",
            f"  lost_peer_s: {lost}         # by then Slurm has named a dead node (SlurmdTimeout is "
            f"{settings.slurmd_timeout_s} s)",
        ]
    return "\n".join(lines) + "\n"


def _described(members: Members) -> str:
    nodes = counted(members.n_nodes, "node")
    if members.hidden:
        return f"{nodes}, which the site does not show to users (PrivateData=nodes)"
    return f"{nodes}, {members.n_alike} of them like this one"


def _gpus_line(members: Members) -> str:
    if members.hidden and not members.gpus:
        return "  # gpus_per_node: 8      # enter it: Slurm does not show them, and no node was asked"
    return f"  gpus_per_node: {members.gpus}"


def _cpus_line(members: Members) -> str:
    if members.usable_cpus is None:
        return f"  cpus_per_node: {members.cpus}"
    why = f"sbatch takes no more of Slurm's {members.cpus} for a rank on each GPU"
    return f"  cpus_per_node: {members.usable_cpus}       # {why}"


def _switch_lines(topology: SlurmTopology) -> list[str]:
    """Return how many nodes a leaf switch of Slurm's tree has: blocks are asked for in another way."""
    size = usual_leaf_size(topology.leaves)
    if topology.kind != "tree" or size is None:
        return []
    return [f"  nodes_per_switch: {size}     # jobs ask for as few leaf switches as hold them (--switches)"]


def _topology_lines(topology: SlurmTopology) -> list[str]:
    if not topology.leaves:
        return []
    called = "leaf switches" if topology.kind == "tree" else "groups of nodes"
    lines = [f"Topology: {topology.kind}, {len(topology.leaves)} {called}:"]
    shown = list(topology.leaves.items())[:_SHOWN_SWITCHES]
    lines += [f"  {leaf}: {compress(nodes)}" for leaf, nodes in shown]
    remaining = len(topology.leaves) - _SHOWN_SWITCHES
    return lines + ([f"  and {remaining} more (scontrol show topology)"] if remaining > 0 else [])


def _comment(text: str) -> str:
    """Return one line that stays a comment, whatever a driver or an administrator called something."""
    return "# " + "".join(character if character.isprintable() else "?" for character in text)


def _unprobed_lines(reason: str | None) -> list[str]:
    why = " (see above)" if reason else ""
    return [
        f"  # network:                # not known{why}: `zslurm init --probe` reads NICs and drivers of a node"
    ]


def _interface_line(found: Probe | None) -> str:
    if found is not None and found.interface is not None:
        return f"  interface: {scalar(found.interface)}          # of the network itself, as HPE advises"
    return "  # interface: eth0         # management network, for rendezvous; needed if a node has several"


def _probed_lines(members: Members, found: Probe) -> list[str]:
    lines = list(_FABRIC_LINES) if found.extends == "mi300x-pollara" else []
    lines += [f"  gpu_family: {scalar(found.gpu_family)}"] if found.gpu_family and not found.extends else []
    if found.network and not found.extends:
        lines.append(f"  network: {found.network}")
    elif found.unknown_nics:
        lines.append("  network: other            # the RCCL rules know the driver of no NIC of the node")
    elif found.network is None and found.gpus:
        lines.append("  # network:                # not known: the probe saw no NIC whose driver it can read")
    if found.nics and found.gpus == members.gpus:
        lines.append("  nics: [" + ", ".join(scalar(nic) for nic in found.nics) + "]   # in rail order")
        if found.gpu_nics:
            lines.append(f"  gpu_nics: [{', '.join(map(str, found.gpu_nics))}]")
    elif found.gpus != members.gpus:
        lines.append(
            f"  # nics: not filled in: Slurm counts {counted(members.gpus, 'GPU')}, the node's kernel {found.gpus}"
        )
    lines += [f"  gid_index: {found.gid_index}   # RoCE v2"] if found.gid_index is not None else []
    if found.traffic_class is not None:
        lines.append(f"  traffic_class: {found.traffic_class}   # in which the NICs drop nothing")
    if found.gpu_numa and found.gpus == members.gpus:
        lines.append(f"  gpu_numa: [{', '.join(map(str, found.gpu_numa))}]   # ranks are bound to its cores")
    if found.rocm_version:
        lines.append(f"  rocm_version: '{found.rocm_version}'")
    if found.rccl_version:
        lines.append(
            f"  rccl_version: {found.rccl_version}   # of the node's ROCm; a wheel or container may differ"
        )
    if found.ainic_transport:
        lines.append(f"  ainic_transport: {found.ainic_transport}   # no plugin was found: see above")
    if found.peermem is not None:
        lines.append(f"  peermem: {str(found.peermem).lower()}")
    if found.scontrol is False:
        lines.append("  scontrol_on_nodes: false   # jobs cannot requeue themselves: see slurm.successor")
    return lines


def local_profile(name: str, gpus: int, cpus: int) -> str:
    """Return the text of a profile of this machine, which has no Slurm."""
    lines = [
        "# Cluster profile of zslurm, written by `zslurm init` on a machine without Slurm. Edit it freely.",
        "cluster:",
        f"  name: {scalar(name)}",
        "  launcher: local",
        f"  gpus_per_node: {gpus}",
        f"  cpus_per_node: {cpus}",
    ]
    return "\n".join(lines) + "\n"


def scalar(text: str) -> str:
    """Return a YAML scalar that reads back as the word `text`, which has no control characters."""
    if _PLAIN.fullmatch(text) and plain_scalar(text) == text:
        return text
    return "'" + text.replace("'", "''") + "'"
