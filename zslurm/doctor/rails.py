"""The problems of a node's rails (zslurm.cluster.rails.map), sorted to the checks that tell them."""

from __future__ import annotations

from collections.abc import Set

from zslurm.cluster.rails.map import Problem, RailMap, rail_map
from zslurm.cluster.rccl.environment import environment
from zslurm.hardware.node_sources import Sources

OF_NICS = frozenset({"missing-nic", "nic-down", "slow"})
OF_GIDS = frozenset({"no-roce-v2"})
OF_PAIRING = frozenset({"no-near-nic", "shared-nic", "permuted", "different"})


def node_rails(sources: Sources) -> RailMap:
    """The map of this node, for the GID index that ranks are told to use."""
    told = {setting.name: setting.value for setting in environment(sources.cluster)}.get("NCCL_IB_GID_INDEX", "")
    return rail_map(sources.facts, sources.cluster, int(told) if told.isdecimal() else None)


def of_kind(sources: Sources, kinds: Set[str]) -> list[Problem]:
    """The problems of some kinds."""
    return [problem for problem in node_rails(sources).problems if problem.kind in kinds]
