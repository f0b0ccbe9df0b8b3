"""Ranks that exited with 0 before the end of the run, and recorded nothing.

srun names only tasks that failed. A rank that calls `os._exit(0)`, or whose C library calls `exit(0)`, looks to
srun like a rank that is done; all that is seen of it are its peers, which have lost a connection. Every rank that
ends in order leaves a record, so the rank without one that srun did not name either is the root.

That holds only if srun itself ended in order, for only then has it reported every task.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

from zslurm.aegis.fault_kinds import EARLY_EXIT
from zslurm.aegis.types import Fault
from zslurm.slurm.hostlist import compress_ranges
from zslurm.slurm.on_nodes.srun_output import failed_nodes, launch_failures, may_lack_ends, task_failures

LINE = "exited with exit code 0 before the end of the run"

_MOST_NAMED = 8
"""More ranks than these are one fault: what all of them did is a matter of the program, not of a rank."""


def early_exits(
    step_exit: int,
    step_log: str,
    rank_ends: Sequence[Mapping[str, Any]],
    rank_nodes: Sequence[str],
    *,
    dead: Collection[str],
    step: int | None,
    now: float,
) -> list[Fault]:
    """Return a fault for each rank that exited with 0 too early and recorded nothing.

    Args:
        step_exit: exit code with which srun, or the local launcher, ended in order.
        step_log: what it printed.
        rank_ends: what ranks recorded (AttemptDir.rank_end).
        rank_nodes: the node of each rank.
        dead: nodes that died: their ranks could record nothing.
        step: the last optimizer step of the attempt, if one is known.
        now: UNIX seconds, for a fault that no peer complained of.
    """
    failures = task_failures(step_log)
    if may_lack_ends(step_log) or (step_exit != 0 and not failures):
        return []
    lost = {*dead, *failed_nodes(step_log), *launch_failures(step_log)}
    accounted = {rank for failure in failures for rank in failure.ranks} | {int(end["rank"]) for end in rank_ends}
    early = [rank for rank, node in enumerate(rank_nodes) if rank not in accounted and node not in lost]
    # The complaints of its peers came after it.
    when = min([now, *(float(end["time"]) for end in rank_ends)])
    if len(early) > _MOST_NAMED:
        ranks = compress_ranges(early)
        line = f"ranks {ranks} {LINE}"
        return [Fault.of_kind(EARLY_EXIT, when, "srun", line, step=step)]
    return [
        Fault.of_kind(EARLY_EXIT, when, "srun", LINE, node=rank_nodes[rank], rank=rank, step=step)
        for rank in early
    ]
