"""Check a profile's fabric, and what it states of Slurm's leaf switches, against each other and against Slurm."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from zslurm.checkpoint_tools.quantities import counted
from zslurm.cluster.rails.fabric import fabric_of
from zslurm.config.spec import ClusterSection
from zslurm.core.errors import ZslurmError
from zslurm.slurm.client import SlurmClient
from zslurm.slurm.hostlist import compress, compress_ranges, expand
from zslurm.slurm.inventory import SlurmPartition
from zslurm.slurm.topology import usual_leaf_size


def fabric_summary(cluster: ClusterSection) -> str | None:
    """Return what the profile lists, in one line; None if it lists no slices."""
    fabric = fabric_of(cluster.fabric)
    if fabric is None:
        return None
    leaves = {slice_.leaf for slice_ in cluster.fabric.slices}
    count = sum(len(slice_.rails) for slice_ in cluster.fabric.slices)
    return (
        f"{counted(len(fabric.slices), 'node')} on {counted(count, 'slice')} of "
        f"{counted(len(leaves), 'leaf switch', 'leaf switches')}"
    )


def missing_slices(cluster: ClusterSection) -> Iterator[str]:
    """Find nodes and rails that the profile leaves out of its slices."""
    section = cluster.fabric
    if not section.slices:
        if cluster.rails_only:
            yield "cluster.fabric.slices: not given, so ranks are numbered in Slurm's order; see docs/rails.md"
        return
    if absent := set(range(len(cluster.nics) or cluster.gpus_per_node)) - set(section.rails):
        yield f"cluster.fabric.slices: nothing is listed for rail {compress_ranges(absent)}; hops leave it out"
    listed: dict[int, set[str]] = {rail: set() for rail in section.rails}
    for slice_ in section.slices:
        for rail in slice_.rails:
            listed[rail].update(expand(slice_.nodes))
    every = set().union(*listed.values())
    for rail, nodes in listed.items():
        if every - nodes:
            yield f"cluster.fabric.slices: {compress(every - nodes)}: on no slice of rail {rail}"


def strangers(
    cluster: ClusterSection, known: Sequence[str], members: Sequence[str]
) -> tuple[list[str], list[str]]:
    """Return faults and warnings about nodes that are on slices or in Slurm, but not in both.

    Args:
        cluster: the profile's section.
        known: every node of Slurm.
        members: the nodes of the profile's partition.
    """
    fabric = fabric_of(cluster.fabric)
    if fabric is None or not known:
        return [], []
    faults, warnings = [], []
    if unknown := set(fabric.slices) - set(known):
        faults.append(f"cluster.fabric.slices: Slurm has no node {compress(unknown)}")
    if unlisted := set(members) - set(fabric.slices):
        warnings.append(
            f"cluster.fabric.slices: {compress(unlisted)}: on no slice; a run on them counts every hop "
            "through a spine"
        )
    return faults, warnings


def leaf_size_notes(cluster: ClusterSection, client: SlurmClient, partition: SlurmPartition) -> Iterator[str]:
    """Compare `nodes_per_switch` with Slurm's topology of the partition."""
    configured = cluster.nodes_per_switch
    try:
        topology = client.topology(partition.topology)
    except ZslurmError:
        return
    size = usual_leaf_size(topology.leaves) if topology.kind == "tree" else None
    if size == configured:
        return
    if size is None:
        yield f"cluster.nodes_per_switch: {configured}, but Slurm has no topology/tree: --switches changes nothing"
    elif configured is None:
        yield (
            f"cluster.nodes_per_switch: not given, so jobs do not ask for few leaf switches; Slurm's have "
            f"{counted(size, 'node')} each"
        )
    else:
        yield f"cluster.nodes_per_switch: {configured}, but most leaf switches have {counted(size, 'node')}"
