"""Can NICs reach the memory of GPUs, by peermem or by dma-buf?

Where neither works RCCL trains all the same, and copies every message between nodes through host memory.
"""

from __future__ import annotations

from zslurm.cluster.rccl.environment import environment
from zslurm.cluster.rccl.lint_network import dmabuf_by_default
from zslurm.cluster.rccl.rules import vendor_of
from zslurm.doctor.check import Check, Outcome, failed, passed, unavailable, warned
from zslurm.hardware.node_sources import Sources


def check(sources: Sources) -> Outcome | None:
    """The kernel's peer memory, and RCCL's switch for dma-buf, on nodes with AMD GPUs and a fast network."""
    cluster, found = sources.cluster, sources.facts.peermem
    if vendor_of(cluster) != "amd" or not cluster.network or not sources.facts.gpus:
        return None
    facts = {"peermem": {True: "there", False: "missing", None: None}[found]}
    if found is None:
        return unavailable("neither memory_peers in sysfs nor /proc/kallsyms tells whether there is peermem")
    if found:
        if cluster.peermem is False:
            return warned(
                "peermem is there, cluster.peermem is false", "set cluster.peermem: true", must_match=facts
            )
        return passed("peermem is there", must_match=facts)
    given = {setting.name: setting.value for setting in environment(cluster)} | dict(sources.environ)
    dmabuf = given.get("NCCL_DMABUF_ENABLE")
    stated = cluster.rocm_version or cluster.rccl_version
    known = cluster if stated else cluster.model_copy(update={"rocm_version": sources.facts.rocm})
    if dmabuf == "0" or (dmabuf is None and not dmabuf_by_default(known)):
        shown = "not set" if dmabuf is None else dmabuf
        return failed(
            f"no peermem, and NCCL_DMABUF_ENABLE is {shown}: messages go through host memory",
            "set cluster.peermem: false (the rules then turn dma-buf on), or have amdgpu's peermem loaded",
            must_match=facts,
        )
    return passed("no peermem; RCCL takes dma-buf", must_match=facts)


CHECK = Check("peermem", "network", "NICs reach GPU memory by peermem or dma-buf", "node", check)
