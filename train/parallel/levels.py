"""The groups of two-level collectives, and whether a run can and should use them.

Two levels need several nodes of several ranks each, equally many on every node, numbered node by node; if that
is not so, collectives are flat. It depends on every rank's own LOCAL_RANK and LOCAL_WORLD_SIZE, torchrun's
variables, so the ranks agree on it with one small all-reduce.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist

from zslurm.checkpoint_tools.quantities import counted
from zslurm.train.config import ParallelConfig
from zslurm.train.parallel.topology import Topology
from zslurm.train.parallel.world import World


@dataclass(frozen=True)
class Levels:
    """This rank's groups: the ranks of its node, and the ranks of its rail."""

    topology: Topology
    node: dist.ProcessGroup
    rail: dist.ProcessGroup


def choose_levels(parallel: ParallelConfig, world: World) -> tuple[Levels | None, str | None]:
    """Return the levels of a run, None for flat collectives, and a line on them for the user.

    All ranks must call it at the same point, and get the same answer. `auto` is flat: what submits a run knows its
    network, and asks for two levels if that has rails only.
    """
    if parallel.collectives != "two_level":
        return None, None
    if why := _why_flat(world):
        return None, f"note: parallel.collectives: two_level does not fit, as {why}: collectives are flat"
    topology = Topology(world.size // world.local_size, world.local_size)
    levels = make_levels(topology, world.rank, timedelta(seconds=parallel.timeout_s))
    inside, along = counted(topology.local_size, "rank"), counted(topology.nodes, "node")
    return levels, f"collectives in two levels: {inside} in each node, {along} along each rail"


def _why_flat(world: World) -> str:
    """Return what keeps the run from two levels, the same on all ranks; empty if nothing does."""
    local_size, local_rank = world.local_size, int(os.environ.get("LOCAL_RANK", "0"))
    in_order = world.rank % local_size == local_rank and world.size % local_size == 0
    bounds = torch.tensor([local_size, -local_size, not in_order], dtype=torch.int64, device=world.device)
    dist.all_reduce(bounds, dist.ReduceOp.MAX, group=world.group)
    most, least, disordered = bounds.tolist()
    if most != -least:
        return f"nodes have {-least} to {counted(most, 'rank')}"
    if disordered:
        return "ranks are not numbered node by node"
    if local_size == world.size:
        return "there is one node"
    return "each node has one rank" if local_size == 1 else ""


def make_levels(topology: Topology, rank: int, timeout: timedelta | None = None) -> Levels:
    """Make this rank's groups; all ranks must do so at the same point."""

    def make(name: str, ranks: range) -> dist.ProcessGroup:
        # Every rank is in one node and on one rail: each makes its own group of either kind, NCCL all of a kind in
        # one split. Made by all ranks one after the other, 128 nodes of eight would take 136 of them.
        group = dist.new_group(
            list(ranks), timeout=timeout, use_local_synchronization=True, group_desc=f"{name} {ranks.start}"
        )
        assert group is not None, f"rank {rank} is not in its own {name}"
        return group

    node = make("node", topology.node_ranks(rank))
    return Levels(topology, node, make("rail", topology.rail_ranks(rank)))
