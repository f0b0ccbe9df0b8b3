"""Checks of a node's system: Slurm, kernel, versions, Python, clock, and what old jobs left."""

from __future__ import annotations

import os
import re
import statistics
import sys
from collections.abc import Mapping
from importlib import metadata, util
from pathlib import Path

import zslurm
from zslurm.checkpoint_tools.quantities import counted
from zslurm.core.errors import SlurmRefused, SlurmUnavailable
from zslurm.core.files import read_text
from zslurm.doctor.check import (
    MOST_NAMED,
    CheckOutcome,
    NodeData,
    Status,
    check,
    failed,
    first_few,
    passed,
    unavailable,
    warned,
    worst,
)
from zslurm.hardware.job_processes import Process, processes
from zslurm.hardware.node_sources import Sources
from zslurm.slurm.client import SlurmClient
from zslurm.slurm.environment import array_id, cluster_name, own_job_id
from zslurm.slurm.run_command import Retries
from zslurm.slurm.settings import read_settings

_DRIVERS = ("amdgpu", "nvidia", "ionic", "ionic_rdma", "bnxt_re", "mlx5_core")
_RCCL_HEADERS = ("/opt/rocm/include/rccl/rccl.h", "/usr/include/nccl.h")
_RCCL_VERSION = re.compile(r"^#define\s+NCCL_(MAJOR|MINOR|PATCH)\s+(\d+)", re.MULTILINE)
_MANY_ZOMBIES = 20


@check("slurm", "Slurm's commands are here and its controller answers", "login")
def slurm(sources: Sources) -> CheckOutcome | None:
    """Ask the controller for its configuration."""
    if sources.cluster.launcher != "slurm":
        return None
    client = SlurmClient(sources.environ, retries=Retries(attempts=2))
    try:
        settings = read_settings(client.scontrol_config())
    except (SlurmUnavailable, SlurmRefused) as error:
        return failed(str(error), "run this on a login node; ask the site whether slurmctld is down")
    return passed(f"Slurm {settings.version or '?'}, cluster {settings.cluster or '?'}")


@check("system", "numa_balancing off, iommu=pt, the same kernel everywhere", "node", inconsistent=Status.WARN)
def kernel(sources: Sources) -> CheckOutcome | None:
    """Look at kernel.numa_balancing=0 and iommu=pt, on nodes with GPUs; the kernel's release everywhere.

    RCCL itself warns of both (init.cc): NUMA balancing moves pages that a NIC has pinned, and without iommu=pt
    every transfer is translated, or GPUs cannot reach each other at all.
    """
    facts = sources.facts
    must_match = {"kernel": facts.kernel}
    if not sources.has_gpus:
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


@check("system", "ROCm, RCCL and drivers are the same on all nodes", "node")
def versions(sources: Sources) -> CheckOutcome | None:
    """Read the versions in files of ROCm and of the kernel's modules; that nodes agree is found by comparing."""
    facts, stated = sources.facts, sources.cluster.rccl_version
    rccl = _rccl(sources)
    modules = {f"driver {name}": facts.module_versions.get(name) for name in _DRIVERS}
    versions_read = {"ROCm": facts.rocm, "RCCL": rccl} | {name: value for name, value in modules.items() if value}
    versions_known = {name: value for name, value in versions_read.items() if value}
    if not versions_known:
        if not sources.has_gpus:
            return None
        return unavailable("no version of ROCm, RCCL or a driver can be read", "is ROCm installed in /opt/rocm?")
    if stated and rccl and not f"{rccl}.".startswith(f"{stated}."):
        remedy = "set cluster.rccl_version in the profile: rules depend on it"
        return warned(f"RCCL is {rccl}, the profile has {stated}", remedy, must_match=versions_read)
    return passed(", ".join(f"{name} {value}" for name, value in versions_known.items()), must_match=versions_read)


def _rccl(sources: Sources) -> str | None:
    """Return the version that a header defines, as in rccl.h: NCCL_MAJOR, NCCL_MINOR, NCCL_PATCH."""
    for header in _RCCL_HEADERS:
        numbers = dict(_RCCL_VERSION.findall(read_text(sources.path(header)) or ""))
        if len(numbers) == 3:
            return ".".join(numbers[field] for field in ("MAJOR", "MINOR", "PATCH"))
    return None


@check("system", "Python, zslurm and torch are the same on all nodes and here", "both")
def python(sources: Sources) -> CheckOutcome:
    """Read the versions of Python, zslurm and torch, without importing torch."""
    versions = {
        "Python": ".".join(map(str, sys.version_info[:3])),
        "zslurm": zslurm.__version__,
        "torch": _version("torch"),
    }
    if util.find_spec("torch") is None:
        return failed("torch is not installed", f"install it into {Path(sys.prefix)}", must_match=versions)
    return passed(", ".join(f"{name} {value}" for name, value in versions.items()), must_match=versions)


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def compare_clocks(nodes: Mapping[str, NodeData], sources: Sources) -> Mapping[str, CheckOutcome]:
    """Compare each node's clock with the login node's and with the other nodes'.

    Timestamps are exchanged through Slurm's own I/O. The answer was sent before it came, and the task was handed
    out before the node began. So with s and r, the sending and the coming by the clock here, and b and e, the
    beginning and the end by the clock there, the node's clock is ahead by something between e - r and b - s: as
    wide as the start of the job was long. Nodes among themselves are compared by e - r, which is wrong by an
    answer's travel only.
    """
    limit, by_node = sources.limits.clock_skew_s, {}
    ahead_at_least = {name: node.ended - node.received for name, node in nodes.items()}
    typical = statistics.median(ahead_at_least.values()) if nodes else 0.0
    for name, node in nodes.items():
        low, high = ahead_at_least[name], node.began - node.sent
        among = low - typical
        shown = f"between {low:+.2f} and {high:+.2f} s ahead of here, {among:+.2f} s from most nodes"
        wrong = low > limit or high < -limit or (len(nodes) > 2 and abs(among) > limit)
        remedy = "ask for chrony or ntpd on this node; logs and checkpoints' ages are wrong meanwhile"
        by_node[name] = failed(f"the clock is {shown}", remedy) if wrong else passed(shown)
    return by_node


@check("system", "clocks of nodes against this machine's and each other's", "node", compare=compare_clocks)
def clock(sources: Sources) -> CheckOutcome | None:
    """Pass: a single clock shows nothing; `compare_clocks` compares all of them."""
    return None if sources.cluster.launcher == "local" else passed("the clock was read")


@check("system", "processes of your jobs that are over, and zombies", "node")
def orphaned_processes(sources: Sources) -> CheckOutcome:
    """Find this user's processes of jobs that Slurm does not know as active, and zombies.

    What a killed job left is found by the job and the node in its environment, never by a program's name: data
    loader workers that outlived three cancelled jobs once pinned seven of eight GPUs (GaTech-RL2/EgoVerse#682).
    """
    job_processes = list(processes(sources.root))
    if not job_processes:
        return unavailable("/proc cannot be read")
    own_processes = [process for process in job_processes if process.uid == os.getuid()]
    problems = []
    if orphans := _orphans(own_processes, sources):
        named = first_few([f"{process.pid} {process.name}" for process in orphans])
        of = ", ".join(sorted({process.job or "" for process in orphans}))
        pids = " ".join(str(process.pid) for process in orphans[:MOST_NAMED])
        text = f"{counted(len(orphans), 'process')} of ended jobs ({of}): {named}"
        problems.append(failed(text, f"end them: srun -w {sources.node} kill -9 {pids}"))
    zombies = [process for process in own_processes if process.state == "Z"]
    if len(zombies) >= _MANY_ZOMBIES:
        parents = first_few(sorted({str(process.parent) for process in zombies}))
        problems.append(
            warned(f"{counted(len(zombies), 'zombie')} of yours, children of {parents}", "end their parents")
        )
    if not problems and sources.task.jobs is None:
        return unavailable("Slurm did not show which of your jobs are active")
    return worst(problems, "nothing is left of your old jobs")


def _orphans(mine: list[Process], sources: Sources) -> list[Process]:
    if sources.task.jobs is None:
        return []
    # squeue shows `12_[3-7]` for an array that waits, `12_2` for a task that runs.
    active = {*(job.partition("_")[0] for job in sources.task.jobs), own_job_id(sources.environ)} - {None}
    cluster = cluster_name(sources.environ)
    return [
        process
        for process in mine
        if process.job is not None
        and not {process.job, array_id(process.environ)} & active
        and process.node in (None, sources.node)
        and (cluster is None or cluster_name(process.environ) in (None, cluster))
    ]
