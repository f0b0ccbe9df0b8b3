"""Are the kernel's settings those that RCCL asks for, and is the kernel the same everywhere?

RCCL itself warns of both (init.cc): NUMA balancing moves pages that a NIC has pinned, and without iommu=pt every
transfer is translated, or GPUs cannot reach each other at all.
"""

from __future__ import annotations

from zslurm.doctor.check import Check, Outcome, Status, passed, unavailable, warned, worst
from zslurm.hardware.node_sources import Sources


def check(sources: Sources) -> Outcome | None:
    """kernel.numa_balancing=0 and iommu=pt, on nodes with GPUs; the kernel's release everywhere."""
    facts = sources.facts
    must_match = {"kernel": facts.kernel}
    if not sources.cluster.gpus_per_node and not facts.gpus:
        return passed(f"kernel {facts.kernel}", must_match=must_match) if facts.kernel else None
    problems = []
    if facts.numa_balancing is None:
        problems.append(unavailable("kernel.numa_balancing cannot be read"))
    elif facts.numa_balancing:
        remedy = "ask for `sysctl kernel.numa_balancing=0`"
        problems.append(warned(f"kernel.numa_balancing is {facts.numa_balancing}", remedy))
    if facts.iommu_passthrough is None:
        problems.append(unavailable("the kernel's command line cannot be read"))
    elif not facts.iommu_passthrough:
        problems.append(warned("iommu=pt is not on the kernel's command line", "ask for iommu=pt and a reboot"))
    return worst(problems, "numa_balancing is off, iommu=pt", must_match=must_match)


CHECK = Check(
    "kernel",
    "system",
    "numa_balancing off, iommu=pt, the same kernel everywhere",
    "node",
    check,
    inconsistent=Status.WARN,
)
