"""Can a process pin enough memory for RDMA, inside the step?

The login shell looks fine while the step inherits slurmd's limit (NVIDIA/nccl-tests#206, NVIDIA/nccl#1191).
"""

from __future__ import annotations

from zslurm.checkpoint_tools.quantities import show_bytes
from zslurm.doctor.check import Check, Outcome, failed, passed, unavailable
from zslurm.hardware.node_sources import Sources

_GIB = 1 << 30


def check(sources: Sources) -> Outcome:
    """The limit of this very process: on a node it runs where ranks run."""
    limit, wanted = sources.facts.memlock, sources.limits.memlock_gib
    if limit is None:
        return unavailable("/proc/self/limits cannot be read")
    if limit == "unlimited":
        return passed("memlock is unlimited")
    shown = show_bytes(limit)
    cluster = sources.cluster
    if not (cluster.nics or cluster.network or sources.facts.nics):
        return passed(f"memlock is {shown}; there is no RDMA device that needs more")
    if limit < wanted * _GIB:
        return failed(
            f"memlock is {shown}, {wanted:g} GiB needed",
            "ask for LimitMEMLOCK=infinity in slurmd's unit and PropagateResourceLimitsExcept=MEMLOCK",
        )
    return passed(f"memlock is {shown}")


CHECK = Check("memlock", "limits", "memory that a process inside the step may pin", "node", check)
