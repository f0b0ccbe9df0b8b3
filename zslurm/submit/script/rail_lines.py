"""The rails of a run as lines of a comment: what the job's script shows of the network it was placed for."""

from __future__ import annotations

import math
from collections.abc import Iterator

from zslurm.config.spec import ClusterSection, RunSpec
from zslurm.slurm.hostlist import compress_ranges


def switches_request(spec: RunSpec) -> str | None:
    """Return the value of --switches: as few of Slurm's leaf switches as hold the job; None without any."""
    per_switch, nodes = spec.cluster.nodes_per_switch, spec.slurm.nodes + spec.slurm.spares
    if per_switch is None or nodes < 2:
        return None
    return str(math.ceil(nodes / per_switch))


def rail_lines(spec: RunSpec) -> list[str]:
    """Return the map of rails, and the slices behind them if they are known; nothing without rails."""
    if not spec.cluster.has_rails or spec.cluster.launcher != "slurm":
        return []
    return [*_rails(spec), *_slices(spec.cluster)]


def _rails(spec: RunSpec) -> Iterator[str]:
    cluster, ranks = spec.cluster, spec.ranks_per_node
    yield f"Rails: rank = position of the node x {ranks} + local rank (drawn by zslurm cluster rails --fabric)"
    for gpu in range(min(cluster.gpus_per_node, ranks)):
        rail = cluster.gpu_nics[gpu] if cluster.gpu_nics else gpu
        nic = f"NIC {cluster.nics[rail]}" if cluster.nics else "the NIC closest on PCIe"
        yield f"  rail {rail}: local rank {gpu}, GPU {gpu}, {nic}"
    if cluster.rails_only:
        yield "Nothing goes from one rail to another between nodes."


def _slices(cluster: ClusterSection) -> Iterator[str]:
    fabric = cluster.fabric
    if not fabric.slices:
        return
    yield f"Leaf slices ({fabric.summary}); ranks are numbered along the shortest ring over them:"
    for slice_ in fabric.slices:
        word = "rail" if len(slice_.rails) == 1 else "rails"
        yield f"  {slice_.leaf}, {word} {compress_ranges(slice_.rails)}: {slice_.nodes}"
