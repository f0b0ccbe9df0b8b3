"""What a group of GPUs inside a node gets of xGMI: all eight or one, and what anything between costs.

Every MI300X of a node has a link to each of the seven others. A collective of n of them uses n - 1 links of each.
"""

from __future__ import annotations

import re

from zslurm.checkpoint_tools.quantities import counted
from zslurm.config.spec import ClusterSection, RunSpec

LINK_GB_S = 64
"""Bandwidth of one link of MI300X and MI325X, in GB/s and direction (arXiv 2511.17127)."""

GPUS = 8
_MESH = re.compile(r"(^|[^a-z0-9])mi3[02][05]x", re.IGNORECASE)


def xgmi_costs(spec: RunSpec) -> list[tuple[str, str]]:
    """Return the keys that give a run groups of some of a node's GPUs, each with the cost in one line."""
    if spec.parallel.device == "cpu":
        return []
    costs = [("slurm.ranks_per_node", group_cost(spec.cluster, spec.ranks_per_node))]
    if spec.ranks_per_node == GPUS:  # else that line has it
        for index, phase in enumerate(spec.phases):
            key = f"phases[{index}].context_parallel"
            costs.append((key, context_cost(spec.cluster, key, phase.context_parallel)))
    return [(key, line) for key, line in costs if line is not None]


def group_cost(cluster: ClusterSection, ranks: int) -> str | None:
    """Return in one line what a group of `ranks` GPUs of a node costs; None if it costs nothing."""
    if not _is_mesh(cluster) or not 1 < ranks < GPUS:
        return None
    group_rate, all_rate = (ranks - 1) * LINK_GB_S, (GPUS - 1) * LINK_GB_S
    return (
        f"{counted(ranks, 'rank')} on each node: xGMI gives a group of n MI300X (n - 1) x {LINK_GB_S} GB/s each, "
        f"{group_rate} GB/s for {ranks} against {all_rate} GB/s for all {GPUS}, {all_rate / group_rate:.1f} times "
        f"as much; use {GPUS} ranks per node, or 1"
    )


def context_cost(cluster: ClusterSection, key: str, ranks: int) -> str | None:
    """Return in one line why a context group of a whole node is better than one of `ranks`; None for 1 or 8."""
    if not _is_mesh(cluster) or not 1 < ranks < GPUS:
        return None
    group_rate, all_rate, factor = (ranks - 1) * LINK_GB_S, (GPUS - 1) * LINK_GB_S, ranks / GPUS
    return (
        f"{key} ({ranks}): xGMI gives {counted(ranks, 'GPU')} {group_rate} GB/s each and {GPUS} GPUs {all_rate} "
        f"GB/s; {GPUS} is advised: keys and values of a sequence then take {factor:g} times as long, its "
        f"activations {factor:g} times the memory, and fewer data-parallel ranks divide the batch: a lost node "
        "costs less"
    )


def _is_mesh(cluster: ClusterSection) -> bool:
    return bool(_MESH.search(cluster.gpu_family or cluster.gpu_type or ""))
