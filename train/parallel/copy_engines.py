"""Weights in a symmetric window, from which the GPUs' copy engines gather them.

RCCL from 2.28.3 on (ROCm 7.12) and NCCL from 2.28 on make an all-gather without compute units if the communicator
has the policy NCCL_CTA_POLICY_ZERO, all of its ranks are on one node, and every rank has registered the output as
a symmetric window (`ncclCeAvailable` in RCCL's ce_coll.cc). The rules set the policy for `cluster.copy_engines`
(zslurm/cluster/rccl/rules.yaml). This module registers the weights, which ZeRO-1 gathers in place: with two levels
for the ranks of the node, else for all ranks if they are on one node. Collectives without a window use the same
kernels as before.

No GPU has run this yet.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext

import torch
import torch.distributed as dist

from zslurm.train.parallel.levels import Levels
from zslurm.train.parallel.world import World

_LOG = logging.getLogger(__name__)
_POOLS: list[torch.cuda.MemPool] = []
"""The memory of windows, which tensors use until the process ends."""
POLICY, ZERO = "NCCL_CTA_POLICY", "2"
"""The variable that the rules set, and its value for collectives without compute units."""


def why_not(world: World, levels: Levels | None, local: int, environ: Mapping[str, str]) -> str | None:
    """Return why the weights cannot be a symmetric window; None if they can, empty if it is not asked for.

    All ranks get the same answer.

    Args:
        world: the run.
        levels: the groups of collectives in two levels.
        local: the ranks of a node that all nodes have.
        environ: this process's environment.
    """
    if environ.get(POLICY) != ZERO or world.device.type != "cuda":
        return ""
    if levels is None and local != world.size:
        return "collectives are flat over several nodes; only groups inside a node are gathered by copy engines"
    if world.making_groups is not nullcontext:
        return "recovery in memory aborts the groups, and a window of an aborted group was not tried"
    return None


def weights_memory(
    world: World, levels: Levels | None, local: int, environ: Mapping[str, str] = os.environ
) -> Callable[[], AbstractContextManager[None]]:
    """Return a context in which the weights are to be allocated, all ranks together."""
    why = why_not(world, levels, local, environ)
    if why is not None:
        if why:
            _LOG.warning("%s=%s: the weights are no symmetric window: %s", POLICY, ZERO, why)
        return nullcontext
    group = world.group if levels is None else levels.node
    return lambda: _window(group, world.device)


@contextmanager
def _window(group: dist.ProcessGroup, device: torch.device) -> Iterator[None]:
    """Allocate from memory that the group can register, and register what was allocated as a symmetric window."""
    backend = group._get_backend(device)
    pool = torch.cuda.MemPool(backend.mem_allocator)
    _POOLS.append(pool)
    with torch.cuda.use_mem_pool(pool, device):
        yield
    backend.register_mem_pool(pool, symm=True)  # type: ignore[attr-defined]  # only NCCL's and RCCL's has it
    _LOG.info("the weights are a symmetric window of %d ranks: copy engines can gather them", group.size())
