"""What a node is: its GPUs, RDMA NICs, kernel and drivers, as sysfs and procfs have them.

Nothing is run and nothing is asked of a driver's library, so this works for any user, in a job or outside, and
takes a few milliseconds. Only the program below asks the NICs' tools for the class of RoCE. What cannot be read is
None, never a guess. No name of a NIC is ever taken for granted: the same card is `ionic_3`, `rdma3`,
`rocep195s0` or `roce_ai3`, as the site likes it.

`python -m zslurm.hardware.facts` answers `zslurm.slurm.on_nodes.run_on_nodes`.
"""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

from zslurm.core.files import read_text
from zslurm.hardware.command import CommandResult, run
from zslurm.hardware.gpus import Gpu, read_gpus
from zslurm.hardware.nics import Nic, read_cxi, read_nics
from zslurm.hardware.sysfs import names, read_int, sysroot
from zslurm.slurm.environment import node_name

# Where `make install` of ROCm/amd-anp puts the plugin, and where AMD's scripts look for it (Primus, hook 03).
_ANP = ("opt/rocm/lib/librccl-anp.so", "opt/amd-anp/build/librccl-anp.so")

# RCCL looks here for the client that the GPUs' driver registers (net_ib.cc, ncclIbGdrSupport).
_PEERS = ("sys/kernel/mm/memory_peers", "sys/kernel/memory_peers", "sys/memory_peers")
_CLIENT = "amdkfd"
_SYMBOL = " ib_register_peer_memory_client"


@dataclass(frozen=True)
class NodeFacts:
    """A node.

    Attributes:
        node: its name in Slurm, or the host's.
        cxi: NICs of HPE Slingshot.
        kernel: release of the running kernel.
        command_line: of that kernel.
        numa_balancing: kernel.numa_balancing; 0 is off.
        memlock: most bytes that this very process may pin; `unlimited` if there is no limit. Inside a Slurm
            step this is what the ranks get, whatever a login shell shows.
        rocm: version of ROCm in /opt/rocm.
        anp: whether AMD's network plugin librccl-anp.so is in ROCm's lib, or where its own build leaves it.
        peermem: whether the kernel lets NICs reach the memory of AMD's GPUs by peer memory; None if it cannot
            be read, and on nodes without such GPUs.
        modules: kernel modules that are loaded; None if /proc/modules cannot be read.
        module_versions: of those that carry a version.
        scontrol: whether a job on this node finds scontrol, without which it cannot requeue itself.
        traffic_classes: see `lossless.read_classes`; only if this module runs as a program.
    """

    node: str
    gpus: tuple[Gpu, ...] = ()
    nics: tuple[Nic, ...] = ()
    cxi: tuple[Nic, ...] = ()
    kernel: str | None = None
    command_line: str | None = None
    numa_balancing: int | None = None
    memlock: int | Literal["unlimited"] | None = None
    rocm: str | None = None
    anp: bool = False
    peermem: bool | None = None
    nvidia_driver: str | None = None
    modules: tuple[str, ...] | None = None
    module_versions: Mapping[str, str] = field(default_factory=dict)
    scontrol: bool | None = None
    traffic_classes: Mapping[str, int | None] = field(default_factory=dict)

    @property
    def iommu_passthrough(self) -> bool | None:
        """Whether the kernel was started with iommu=pt (or iommu.passthrough=1, as ARM has it)."""
        if self.command_line is None:
            return None
        words = self.command_line.split()
        return "iommu=pt" in words or "iommu.passthrough=1" in words


def read_facts(root: Path | None = None) -> NodeFacts:
    """Look at this node, with /sys, /proc and /opt below `root` (default: `sysroot()`)."""
    root = root or sysroot()
    proc, sys = root / "proc", root / "sys"
    loaded = read_text(proc / "modules")
    gpus = tuple(read_gpus(root))
    return NodeFacts(
        node=node_name(),
        gpus=gpus,
        nics=tuple(read_nics(root)),
        cxi=tuple(read_cxi(root)),
        kernel=read_text(proc / "sys/kernel/osrelease"),
        command_line=read_text(proc / "cmdline"),
        numa_balancing=read_int(proc / "sys/kernel/numa_balancing"),
        memlock=_memlock(proc),
        rocm=read_text(root / "opt/rocm/.info/version"),
        anp=any((root / location).exists() for location in _ANP),
        peermem=_peermem(root) if any(gpu.kind == "amd" for gpu in gpus) else None,
        nvidia_driver=read_text(sys / "module/nvidia/version"),
        modules=None if loaded is None else tuple(sorted(line.split()[0] for line in loaded.splitlines() if line)),
        module_versions={
            name: version
            for name in names(sys / "module")
            if (version := read_text(sys / "module" / name / "version"))
        },
        scontrol=shutil.which("scontrol") is not None,
    )


def _peermem(root: Path) -> bool | None:
    """As RCCL finds it: a client of the GPUs' driver, or a kernel that has peer memory itself (Ubuntu's HWE)."""
    if any((root / peers / _CLIENT / "version").exists() for peers in _PEERS):
        return True
    try:
        with (root / "proc/kallsyms").open(encoding="utf-8", errors="replace") as symbols:
            return any(_SYMBOL in line for line in symbols)
    except OSError:
        return None


def _memlock(proc: Path) -> int | Literal["unlimited"] | None:
    """Return the soft limit: `Max locked memory     8388608     8388608     bytes`."""
    match = re.search(r"^Max locked memory +(\d+|unlimited)", read_text(proc / "self/limits") or "", re.MULTILINE)
    return None if match is None else "unlimited" if match[1] == "unlimited" else int(match[1])


def from_json(value: Any) -> NodeFacts:
    """Return the facts of `asdict`, also after a way through JSON.

    Raises:
        ValueError: it is something else.
    """
    # Reading facts needs no pydantic, and a node that only answers a question should not wait for its import.
    from pydantic import TypeAdapter

    return TypeAdapter(NodeFacts).validate_python(value)


def _run(program: str, *arguments: str, timeout_s: float) -> CommandResult | None:
    path = shutil.which(program)
    return None if path is None else run([path, *arguments], os.environ, timeout_s)


if __name__ == "__main__":
    from zslurm.hardware.lossless import read_classes
    from zslurm.slurm.on_nodes.run_on_nodes import answer

    facts = read_facts()
    answer(asdict(replace(facts, traffic_classes=read_classes(_run, facts.nics, 5.0))))
