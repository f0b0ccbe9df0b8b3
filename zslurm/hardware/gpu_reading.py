"""Reads the health of a node's GPUs: from their maker's tool, and from sysfs.

The tool's answer comes first; a field that it leaves open (`N/A`) is taken from sysfs, and only that field.
"""

from __future__ import annotations

from dataclasses import replace

from zslurm.hardware import amd_smi, nvidia_smi, ras
from zslurm.hardware.gpu_health import Gpus
from zslurm.hardware.machine import Machine


def read_gpu_health(sources: Machine) -> Gpus:
    """Ask the tool of the GPUs' maker, and sysfs."""
    nvidia = any(gpu.kind == "nvidia" for gpu in sources.facts.gpus)
    if nvidia or (not sources.facts.gpus and sources.find("nvidia-smi") and not sources.find("amd-smi")):
        return nvidia_smi.read(sources)
    found = amd_smi.read(sources)
    fallback = ras.read(sources)
    if not found.health:
        return replace(found, health=tuple(fallback), source="sysfs" if fallback else found.source)
    by_pci = {gpu.pci: gpu for gpu in fallback if gpu.pci}
    return replace(
        found,
        health=tuple(gpu.filled_from(by_pci[gpu.pci]) if gpu.pci in by_pci else gpu for gpu in found.health),
    )
