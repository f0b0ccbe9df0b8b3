"""Which NIC is a GPU's: the one with the fewest PCIe bridges between, as NCCL and RCCL choose it.

Devices are as close as the common start of their paths in sysfs is long (`sysfs.pci_path`). Names play no part, so
a map found here is the same however udev named the devices.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Sequence
from typing import Literal

from zslurm.hardware.gpus import Gpu
from zslurm.hardware.nics import Nic

Near = Literal["switch", "root complex", "numa", "far"]
"""What GPU and NIC share: a PCIe bridge below the root complex, the root complex, the NUMA node, or nothing."""

_LEVEL: dict[Near, int] = {"switch": 3, "root complex": 2, "numa": 1, "far": 0}


def common_path(gpu: Gpu, nic: Nic) -> tuple[str, ...]:
    """Return the common start of the two devices' paths: root complex, then bridges."""
    pairs = itertools.takewhile(lambda both: both[0] == both[1], zip(gpu.path, nic.path, strict=False))
    return tuple(shared for shared, _ in pairs)


def near(gpu: Gpu, nic: Nic) -> Near:
    """Return what the two share."""
    shared = len(common_path(gpu, nic))
    if shared > 1:
        return "switch"
    if shared == 1:
        return "root complex"
    return "numa" if gpu.numa is not None and gpu.numa == nic.numa else "far"


def closeness(gpu: Gpu, nic: Nic) -> tuple[int, bool]:
    """Return how close the two are, to compare: the more they share the greater."""
    return len(common_path(gpu, nic)), gpu.numa is not None and gpu.numa == nic.numa


def pair(gpus: Sequence[Gpu], nics: Sequence[Nic]) -> dict[int, Nic]:
    """Return the NIC of each GPU, by index. A GPU far from every NIC, if other GPUs have one near, has none.

    If there are as many near NICs as GPUs the result is one to one. NICs that are equally close, behind one
    switch, go to the GPUs in the order of PCI addresses.
    """
    if not gpus or not nics:
        return {}
    best = Counter(max(_LEVEL[near(gpu, nic)] for nic in nics) for gpu in gpus)
    usual = max(best, key=lambda level: (best[level], level))
    candidates = [(gpu, nic) for gpu in gpus for nic in nics if _LEVEL[near(gpu, nic)] >= usual]
    candidates.sort(key=lambda both: (both[0].index, both[1].pci or "", both[1].device))
    candidates.sort(key=lambda both: closeness(*both), reverse=True)  # stable: the order above decides ties
    nic_of_gpu: dict[int, Nic] = {}
    # Each round gives each NIC at most one more GPU: a NIC is shared only where there are too few of them.
    while candidates := [(gpu, nic) for gpu, nic in candidates if gpu.index not in nic_of_gpu]:
        taken = set()
        for gpu, nic in candidates:
            if gpu.index not in nic_of_gpu and nic.device not in taken:
                nic_of_gpu[gpu.index] = nic
                taken.add(nic.device)
    return nic_of_gpu


def nearest(gpus: Sequence[Gpu], nics: Sequence[Nic]) -> dict[int, Nic]:
    """Return the NIC that each GPU shares at least its NUMA node with, by index; several GPUs may have the same.

    So libfabric's providers choose them. On nodes of MI250X one GCD of each card is below its NIC's root complex,
    and the other is below another one of the same NUMA node.
    """
    near_nics = {gpu.index: [nic for nic in nics if near(gpu, nic) != "far"] for gpu in gpus}
    return {
        gpu.index: max(near_nics[gpu.index], key=lambda nic: closeness(gpu, nic))
        for gpu in gpus
        if near_nics[gpu.index]
    }
