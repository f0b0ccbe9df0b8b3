"""Bind each rank to the cores of its GPU's NUMA node, before it allocates anything: memory follows the cores.

The rank does it itself, as any user may. Slurm's own --cpu-bind knows nothing of which GPU a rank takes.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, MutableMapping
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
    return (
        f"cores of NUMA node {numa_of_gpu[gpu]}"
        if numa_of_gpu
        else "cores of the GPU's NUMA node (sysfs of the node)"
    )


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
    nodes = _numa_nodes(environ, root)
    rank = int(environ["LOCAL_RANK"])
    numa = nodes[rank] if rank < len(nodes) else None
    cores = None if numa is None else _cores(root, numa)
    if not cores:
        return None
    own_cores = cores & os.sched_getaffinity(0)
    if not own_cores:
        return f"not bound to NUMA node {numa} of its GPU: the Slurm step has none of that node's cores"
    os.sched_setaffinity(0, own_cores)
    ranks = int(environ.get("LOCAL_WORLD_SIZE", "1"))
    environ[SHARING_VARIABLE] = str(nodes[:ranks].count(numa))
    return f"bound to NUMA node {numa} of its GPU: {counted(len(own_cores), 'core')}"


def _numa_nodes(environ: Mapping[str, str], root: Path) -> list[int | None]:
    """Return the NUMA node of each GPU that the step sees, in the order in which the runtime counts them."""
    asked = environ[VARIABLE]
    gpus = read_gpus(root)
    of_gpu: list[int | None] = (
        [gpu.numa for gpu in gpus] if asked == _AUTO else [int(word) for word in asked.split(",")]
    )
    kinds = {gpu.kind for gpu in gpus}
    visible = environ.get(_VISIBLE[kinds.pop()], "") if len(kinds) == 1 else ""
    try:
        return [of_gpu[int(word)] for word in visible.split(",")] if visible else of_gpu
    except (ValueError, IndexError):  # UUIDs, or counted among the GPUs that a cgroup leaves visible
        return of_gpu


def _cores(root: Path, numa: int) -> set[int]:
    """Return the cores of a NUMA node, from a list such as `0-55,112-167`; none if it cannot be read."""
    try:
        return set(expand_ranges(read_text(root / f"sys/devices/system/node/node{numa}/cpulist") or ""))
    except ZslurmError:
        return set()
