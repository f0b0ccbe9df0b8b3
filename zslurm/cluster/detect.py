"""What a login node can find out about its cluster: enough to write a profile."""

from __future__ import annotations

import os
import re
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

from zslurm.config.yaml12 import plain_scalar
from zslurm.errors import NotFound
from zslurm.slurm.client import SlurmClient
from zslurm.slurm.inventory import Node, Partition

_PLAIN = re.compile(r"[A-Za-z0-9][A-Za-z0-9_./+-]*")


@dataclass(frozen=True)
class Detected:
    """A profile, ready to be written.

    Attributes:
        name: the cluster's.
        text: the YAML of the profile.
        partition_choices: partitions that could have been meant, the best guess first; one if Slurm has a default.
    """

    name: str
    text: str
    partition_choices: list[str]


def detect(*, name: str | None = None, partition: str | None = None) -> Detected:
    """Describe this machine's Slurm, or the machine itself where there is none.

    Args:
        name: name of the profile; default: Slurm's ClusterName, or `local`.
        partition: partition to describe; default: Slurm's default one, else the first with GPUs.

    Raises:
        NotFound: there is no such partition.
        SlurmUnavailable: Slurm's commands are here, but its controller does not answer.
    """
    client = SlurmClient()
    if not client.available():
        return Detected(name or "local", _local_profile(name or "local"), [])
    config = client.scontrol_config()
    partitions, nodes = client.partitions(), client.nodes()
    choices = _choices(partitions, nodes)
    if partition is None and choices:
        partition = choices[0]
    chosen = next((found for found in partitions if found.name == partition), None)
    if chosen is None:
        listed = ", ".join(found.name for found in partitions)
        raise NotFound(f"{partition}: Slurm has no such partition; partitions: {listed}")
    cluster = name or config.get("ClusterName", "slurm")
    return Detected(cluster, _slurm_profile(cluster, chosen, nodes, config), choices)


def _choices(partitions: list[Partition], nodes: list[Node]) -> list[str]:
    defaults = [found.name for found in partitions if found.is_default]
    if defaults:
        return defaults
    with_gpus = {name for node in nodes if node.gpus for name in node.partitions}
    ordered = sorted(partitions, key=lambda found: (found.name not in with_gpus, -found.n_nodes))
    return [found.name for found in ordered]


def _slurm_profile(name: str, partition: Partition, nodes: list[Node], config: dict[str, str]) -> str:
    members = [node for node in nodes if partition.name in node.partitions]
    kinds = Counter((node.gpus, node.gpu_type, node.cpus) for node in members)
    (gpus, gpu_type, cpus), count = kinds.most_common(1)[0] if kinds else ((0, None, 1), 0)
    version = config.get("SLURM_VERSION", "?")
    lines = [
        f"# Cluster profile of zslurm, written by `zslurm init` from Slurm {version}. Edit it freely.",
        f"# Partition {partition.name}: {len(members)} nodes, {count} of them like this one"
        + (f"; time limit {partition.max_time}" if partition.max_time else "; no time limit")
        + ".",
        "cluster:",
        f"  name: {_scalar(name)}",
        "  launcher: slurm",
        f"  gpus_per_node: {gpus}",
        *([f"  gpu_type: {_scalar(gpu_type)}"] if gpu_type else []),
        f"  cpus_per_node: {cpus}",
        "  # interface: eth0         # management network, for rendezvous; needed where a node has several",
        "  # setup:                  # shell lines that run in every job first",
        "  #   - module load rocm",
        "slurm:",
        f"  partition: {_scalar(partition.name)}",
        "  # account: my-account",
    ]
    return "\n".join(lines) + "\n"


def _local_profile(name: str) -> str:
    gpus = _local_gpus()
    lines = [
        "# Cluster profile of zslurm, written by `zslurm init` on a machine without Slurm. Edit it freely.",
        "cluster:",
        f"  name: {_scalar(name)}",
        "  launcher: local",
        f"  gpus_per_node: {gpus}",
        f"  cpus_per_node: {len(os.sched_getaffinity(0))}",
    ]
    return "\n".join(lines) + "\n"


def _local_gpus() -> int:
    """GPUs of this machine by what their drivers show: AMD's KFD topology, NVIDIA's proc directory."""
    amd = 0
    for properties in Path("/sys/class/kfd/kfd/topology/nodes").glob("*/properties"):
        try:
            text = properties.read_text()
        except OSError:
            continue  # nodes that the user may not see
        amd += any(line.startswith("simd_count ") and line.split()[1] != "0" for line in text.splitlines())
    return amd or len(list(Path("/proc/driver/nvidia/gpus").glob("*")))


def _scalar(text: str) -> str:
    """A YAML scalar that reads back as the word `text`, which has no control characters."""
    if _PLAIN.fullmatch(text) and plain_scalar(text) == text:
        return text
    return "'" + text.replace("'", "''") + "'"
