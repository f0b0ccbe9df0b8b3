"""The order of a job's nodes in which its ranks are numbered."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from zslurm.config.spec import ClusterSection
from zslurm.core.errors import ZslurmError
from zslurm.slurm.client import SlurmClient
from zslurm.slurm.hostlist import expand
from zslurm.slurm.topology import order_by_leaf


def rank_order(cluster: ClusterSection, nodes: Sequence[str], client: SlurmClient) -> list[str] | None:
    """The nodes leaf by leaf; None where no leaf is known, and Slurm's own order does as well as any.

    The profile's `leaf_switches` win over Slurm's topology.
    """
    if len(nodes) < 2:
        return None
    leaves: Mapping[str, Sequence[str]] = {leaf: expand(hosts) for leaf, hosts in cluster.leaf_switches.items()}
    if not leaves:
        try:
            leaves = client.topology()
        except ZslurmError:
            return None  # a compute node without scontrol: the order is a matter of speed alone
    known = {node for members in leaves.values() for node in members}
    return order_by_leaf(nodes, leaves) if known.intersection(nodes) else None
