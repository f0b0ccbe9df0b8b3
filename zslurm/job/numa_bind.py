"""Bind each rank to the cores of its GPU's NUMA node, before it allocates anything: memory follows the cores.

The rank does it itself, as any user may. Slurm's own --cpu-bind knows nothing of which GPU a rank takes. Of these
cores it takes those that its Slurm step has: what a site reserves for the system is not among them.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, MutableMapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from zslurm.checkpoint_tools.quantities import counted
from zslurm.core.errors import ZslurmError
from zslurm.core.files import read_text
from zslurm.hardware.gpus import read_gpus
from zslurm.hardware.sysfs import sysroot
from zslurm.slurm.hostlist import expand_ranges

if TYPE_CHECKING:  # every rank imports this module, and none needs the models of the configuration for it
    from zslurm.config.spec import RunSpec

VARIABLE = "ZSLURM_NUMA_BIND"
"""Environment variable of the ranks: `auto`, or the NUMA node of each GPU (`0,0,0,0,1,1,1,1`)."""

SHARING_VARIABLE = "ZSLURM_CORE_RANKS"
"""How many ranks share the cores of this one; train/parallel/world.py divides them among these."""

_AUTO = "auto"
_WITH_OWN_L3 = ("1002:7408",)
"""PCI ids of GPUs of which each is joined to one L3 cache of its NUMA node, in the same order: the GCDs of MI250X
in HPE Cray EX235a, the nodes of LUMI, Frontier and Setonix (OLCF, Frontier user guide, compute nodes)."""
_VISIBLE = {"amd": "ROCR_VISIBLE_DEVICES", "nvidia": "CUDA_VISIBLE_DEVICES"}


def binds(spec: RunSpec) -> bool:
    """Return whether the ranks of a run bind themselves."""
    cluster, slurm = spec.cluster, spec.slurm
    on_gpus = cluster.gpus_per_node > 0 and spec.parallel.device != "cpu"
    if spec.trainer is not None and spec.trainer.launcher == "node":  # one process then has all GPUs
        return False
    return cluster.launcher == "slurm" and on_gpus and slurm.cpu_bind == "gpu"


def bind_variable(spec: RunSpec) -> dict[str, str]:
    """Return what the ranks of a run need to know, as variables of their step."""
    if not binds(spec):
        return {}
    return {VARIABLE: ",".join(map(str, spec.cluster.gpu_numa)) or _AUTO}


def cores_of(spec: RunSpec, gpu: int | None) -> str:
    """Describe which cores the rank on a GPU gets, for the dry run."""
    if spec.slurm.cpu_bind not in ("gpu", "none"):
        return f"cores by srun --cpu-bind={spec.slurm.cpu_bind}"
    if not binds(spec) or gpu is None:
        return "all cores of the step"
    numa_of_gpu = spec.cluster.gpu_numa
    if not numa_of_gpu:
        return "cores of the GPU's NUMA node (sysfs of the node)"
    cache = "the GPU's L3 cache in " if spec.cluster.gpu_family == "mi250x" else ""
    return f"cores of {cache}NUMA node {numa_of_gpu[gpu]}"


@dataclass(frozen=True)
class _Locality:
    """The locality of a GPU: its NUMA node, and which of the `l3_count` L3 caches there is its own."""

    numa: int | None
    l3: int = 0
    l3_count: int = 0


def bind(environ: MutableMapping[str, str], root: Path | None = None) -> str | None:
    """Bind this process, as `VARIABLE` asks; returns what was done, in one line.

    Args:
        environ: with torchrun's variables; learns how many ranks share the cores.
        root: the directory of /sys; default: `sysroot()`.

    Returns:
        None if nothing is asked, or nothing is known of the GPU's NUMA node.
    """
    if VARIABLE not in environ:
        return None
    root = root or sysroot(environ)
    localities = _localities(environ, root)
    rank = int(environ["LOCAL_RANK"])
    locality = localities[rank] if rank < len(localities) else _Locality(None)
    cores = set() if locality.numa is None else _cores(root, locality.numa)
    if not cores:
        return None
    allowed = os.sched_getaffinity(0)
    own_cores = cores & allowed
    if not own_cores:
        return f"not bound to NUMA node {locality.numa} of its GPU: the Slurm step has none of that node's cores"
    ranks = localities[: int(environ.get("LOCAL_WORLD_SIZE", "1"))]
    of_cache = _cores_of_l3(root, locality, cores) & allowed
    sharing = ranks.count(locality) if of_cache else [peer.numa for peer in ranks].count(locality.numa)
    own_cores = of_cache or own_cores
    os.sched_setaffinity(0, own_cores)
    environ[SHARING_VARIABLE] = str(sharing)
    cache = "the L3 cache of its GPU in NUMA node {}" if of_cache else "NUMA node {} of its GPU"
    return f"bound to {cache.format(locality.numa)}: {counted(len(own_cores), 'core')}"


def _localities(environ: Mapping[str, str], root: Path) -> list[_Locality]:
    """Return the locality of each GPU that the step sees, in the order in which the runtime counts them."""
    asked = environ[VARIABLE]
    gpus = read_gpus(root)
    numa: list[int | None] = (
        [gpu.numa for gpu in gpus] if asked == _AUTO else [int(word) for word in asked.split(",")]
    )
    have_l3 = bool(gpus) and all(gpu.pci_id in _WITH_OWN_L3 for gpu in gpus)
    of_gpu = [
        _Locality(node, numa[:index].count(node), numa.count(node)) if have_l3 else _Locality(node)
        for index, node in enumerate(numa)
    ]
    kinds = {gpu.kind for gpu in gpus}
    visible = environ.get(_VISIBLE[kinds.pop()], "") if len(kinds) == 1 else ""
    try:
        return [of_gpu[int(word)] for word in visible.split(",")] if visible else of_gpu
    except (ValueError, IndexError):  # UUIDs, or counted among the GPUs that a cgroup leaves visible
        return of_gpu


def _cores_of_l3(root: Path, locality: _Locality, cores: set[int]) -> set[int]:
    """Return the cores of a GPU's own L3 cache; none if it has none, or the node has other caches than GPUs."""
    if not locality.l3_count:
        return set()
    caches = {
        tuple(_cpu_list(root / f"sys/devices/system/cpu/cpu{core}/cache/index3/shared_cpu_list")) for core in cores
    }
    caches -= {()}
    return set(sorted(caches)[locality.l3]) if len(caches) == locality.l3_count else set()


def _cores(root: Path, numa: int) -> set[int]:
    """Return the cores of a NUMA node; none if they cannot be read."""
    return set(_cpu_list(root / f"sys/devices/system/node/node{numa}/cpulist"))


def _cpu_list(path: Path) -> list[int]:
    """Return the cores of a file with a list such as `0-55,112-167`; none if it cannot be read."""
    try:
        return expand_ranges(read_text(path) or "")
    except ZslurmError:
        return []
