"""Are ROCm, RCCL and the GPU driver the same on all nodes?"""

from __future__ import annotations

import re

from zslurm.core.files import read_text
from zslurm.doctor.check import Check, Outcome, passed, unavailable, warned
from zslurm.hardware.node_sources import Sources

_DRIVERS = ("amdgpu", "nvidia", "ionic", "ionic_rdma", "bnxt_re", "mlx5_core")
_DEFINED = re.compile(r"^#define\s+NCCL_(MAJOR|MINOR|PATCH)\s+(\d+)", re.MULTILINE)
_HEADERS = ("/opt/rocm/include/rccl/rccl.h", "/usr/include/nccl.h")


def check(sources: Sources) -> Outcome | None:
    """Versions as files of ROCm and the kernel's modules have them; that nodes agree is found by comparing."""
    facts = sources.facts
    rccl = _rccl(sources)
    modules = {f"driver {name}": facts.module_versions.get(name) for name in _DRIVERS}
    found = {"ROCm": facts.rocm, "RCCL": rccl} | {name: value for name, value in modules.items() if value}
    known = {name: value for name, value in found.items() if value}
    if not known:
        if not sources.cluster.gpus_per_node and not facts.gpus:
            return None
        return unavailable("no version of ROCm, RCCL or a driver can be read", "is ROCm installed in /opt/rocm?")
    listed = ", ".join(f"{name} {value}" for name, value in known.items())
    stated = sources.cluster.rccl_version
    if stated and rccl and not (rccl == stated or rccl.startswith(f"{stated}.")):
        return warned(
            f"RCCL is {rccl}, the profile says {stated}",
            "set cluster.rccl_version in the profile: rules depend on it",
            must_match=found,
        )
    return passed(listed, must_match=found)


def _rccl(sources: Sources) -> str | None:
    """The version that a header defines, as in rccl.h: NCCL_MAJOR, NCCL_MINOR, NCCL_PATCH."""
    for place in _HEADERS:
        numbers = dict(_DEFINED.findall(read_text(sources.path(place)) or ""))
        if len(numbers) == 3:
            return ".".join(numbers[part] for part in ("MAJOR", "MINOR", "PATCH"))
    return None


CHECK = Check("versions", "system", "ROCm, RCCL and drivers are the same on all nodes", "node", check)
