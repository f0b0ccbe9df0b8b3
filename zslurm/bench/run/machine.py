"""What a result states about the machine: nodes, devices, versions, and the variables in force."""

from __future__ import annotations

import os
import platform
import re
from collections.abc import Mapping, Sequence
from pathlib import Path

import psutil
import torch
from pydantic import BaseModel

from zslurm.bench.result import MeasuredMachine
from zslurm.bench.run.messages import Task
from zslurm.core.files import read_text
from zslurm.core.redact import redact
from zslurm.slurm.hostlist import compress

_VARIABLES = ("NCCL_", "RCCL_", "HSA_", "GLOO_", "HIP_", "ROCR_", "CUDA_", "TORCH_NCCL_", "IONIC_", "UCX_")


class MachineFacts(BaseModel):
    """What one rank sees of its device and node.

    Attributes:
        memory: free bytes of its GPU, or its share of the node's free memory.
    """

    device: str
    gpu: str | None
    gpus: int
    memory: int
    cpu: str
    cores: int


def facts(device: torch.device, local_size: int) -> MachineFacts:
    """Look at this rank's device and node."""
    on_gpu = device.type == "cuda"
    memory = torch.cuda.mem_get_info(device)[0] if on_gpu else psutil.virtual_memory().available // local_size
    return MachineFacts(
        device=device.type,
        gpu=torch.cuda.get_device_name(device) if on_gpu else None,
        gpus=torch.cuda.device_count(),
        memory=memory,
        cpu=_cpu_model(),
        cores=len(os.sched_getaffinity(0)),
    )


def _cpu_model() -> str:
    try:
        text = Path("/proc/cpuinfo").read_text()
    except OSError:
        text = ""
    match = re.search(r"^model name\s*:\s*(.+)$", text, re.MULTILINE)
    return match[1].strip() if match else platform.processor() or platform.machine()


def machine_of(task: Task, ranks: Sequence[MachineFacts]) -> MeasuredMachine:
    """Return the machine that all ranks form: what differs between them, as rank 0 or the least of them has it."""
    first = ranks[0]
    return MeasuredMachine(
        cluster=task.cluster,
        nodes=task.nodes,
        ranks_per_node=task.ranks_per_node,
        device=first.device,
        gpu=first.gpu,
        gpus_per_node=first.gpus,
        gpu_memory=min(rank.memory for rank in ranks),
        cpu=first.cpu,
        cores=first.cores,
    )


def kinds_that_differ(task: Task, ranks: Sequence[MachineFacts]) -> str | None:
    """Return in a line that the nodes have different GPUs, whose figures have no common meaning; None if not."""
    nodes: dict[str, list[str]] = {}
    for rank, seen in enumerate(ranks):
        names = nodes.setdefault(seen.gpu or "no GPU", [])
        if (node := task.nodes[rank // task.ranks_per_node]) not in names:
            names.append(node)
    if len(nodes) == 1:
        return None
    kinds = ", ".join(f"{kind} on {compress(names)}" for kind, names in nodes.items())
    return f"the nodes are of different kinds ({kinds}); measure each kind by itself with --nodelist"


def versions(device: torch.device) -> dict[str, str | None]:
    """Return the versions of what a measurement goes through."""
    collectives = None
    if device.type == "cuda":
        collectives = ".".join(map(str, torch.cuda.nccl.version()))  # type: ignore[no-untyped-call]
    return {
        "python": platform.python_version(),
        "torch": str(torch.__version__),
        "rocm": torch.version.hip,
        "cuda": torch.version.cuda if device.type == "cuda" else None,
        "rccl": collectives if torch.version.hip else None,
        "nccl": None if torch.version.hip else collectives,
        "kernel": platform.release(),
        "driver": _driver(),
    }


def _driver() -> str | None:
    """Return the version of the GPUs' kernel module; None if it has none, as one that is part of the kernel."""
    return next(
        (
            version
            for module in ("amdgpu", "nvidia")
            if (version := read_text(Path("/sys/module", module, "version"))) is not None
        ),
        None,
    )


def variables_in_force(environ: Mapping[str, str]) -> dict[str, str]:
    """Return the variables of RCCL, NCCL and the runtime that this process has."""
    return {name: redact(environ[name]) for name in sorted(environ) if name.startswith(_VARIABLES)}
