"""Do the ranks of a node use all of its xGMI links?"""

from __future__ import annotations

from zslurm.checkpoint_tools.quantities import counted
from zslurm.cluster.rccl.rules import vendor_of
from zslurm.cluster.xgmi import group_cost
from zslurm.doctor.check import Check, Outcome, passed, warned
from zslurm.hardware.node_sources import Sources


def check(sources: Sources) -> Outcome | None:
    """Ranks per node by the profile: one for each GPU, unless slurm.ranks_per_node differs."""
    if vendor_of(sources.cluster) != "amd":
        return None
    ranks = sources.task.ranks_per_node or sources.cluster.gpus_per_node
    cost = group_cost(sources.cluster, ranks)
    if cost is not None:
        return warned(
            cost, "set cluster.gpus_per_node to all GPUs of the node, and slurm.ranks_per_node to 8 or 1"
        )
    return passed(f"{counted(ranks, 'rank')} on each node")


CHECK = Check("xgmi", "gpu", "ranks per node use all xGMI links, or none", "login", check)
