"""Make all ranks choose the same implementations of the kernels' operations, so that they compute alike.

A choice depends on the run's settings and the operands, which the ranks share, and on three things that a node may
have for itself:

    measured tables      in the user's cache directory: all ranks take those that rank 0 reads
    installed packages   asked when a run starts
    builds               that fail when an implementation first runs: asked after the first step of each phase, and
                         of an attempt after all up to the first that is not skipped

What one rank cannot start, all of them leave out, each with one warning. In the very step in which a build fails
some ranks have run it and others the next in line: their gradients differ by rounding, and are added up as ever.

Cost: a broadcast of the tables, a few KiB, and one all-reduce of a number for each implementation, when a run
starts; that all-reduce again after the steps named above. Nodes with different kinds of GPUs stay different.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from zslurm.kernels import dispatch
from zslurm.train.parallel.world import to_device


def share_tables(group: dist.ProcessGroup, device: torch.device) -> None:
    """Choose by the measured tables of the group's first rank; all ranks call it together."""
    if dist.get_world_size(group) == 1:
        return
    tables: list[Any] = [dispatch.tables() if dist.get_rank(group) == 0 else None]
    dist.broadcast_object_list(tables, src=dist.get_global_rank(group, 0), group=group, device=device)
    dispatch.choose_by(tables[0])


def leave_out_together(group: dist.ProcessGroup, device: torch.device) -> None:
    """Leave out, of every operation, what any rank cannot start; all ranks call it together.

    On a GPU the host waits for the answer.
    """
    if dist.get_world_size(group) == 1:
        return
    pairs = [
        (operation, implementation.name)
        for operation in dispatch.operations().values()
        for implementation in operation.implementations
    ]
    missing = to_device([float(name in operation.missing()) for operation, name in pairs], device)
    dist.all_reduce(missing, op=dist.ReduceOp.MAX, group=group)
    for (operation, name), is_missing in zip(pairs, missing.tolist(), strict=True):
        if is_missing and name not in operation.missing():
            operation.leave_out(name, "another rank cannot start")
