"""What a cluster consists of: its partitions, and its nodes with their GPUs, from scontrol and sinfo."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from datetime import timedelta

from zslurm.slurm.jobs import parse_duration, queue_format, split_records

_NODE_FIELDS = ("NodeList", "StateComplete", "Gres", "CPUs", "Memory", "PartitionName", "Reason")
NODE_FORMAT = queue_format(_NODE_FIELDS)
"""For sinfo --Node --Format."""

_ADDRESS_FIELDS = ("NodeList", "NodeAddr", "Port")
ADDRESS_FORMAT = queue_format(_ADDRESS_FIELDS)
"""For sinfo --Node --Format."""

_USABLE = {"idle", "mixed", "allocated", "completing"}
_DOWN = {"down", "error", "fail", "failing"}
_UNUSABLE_FLAGS = {"drain", "fail", "maintenance", "reboot_issued", "reboot_requested", "powering_down"}
# What sinfo appends to a base state, besides words after a `+`.
_SYMBOLS = {
    "*": "not_responding",
    "$": "maintenance",
    "@": "reboot_requested",
    "^": "reboot_issued",
    "~": "powered_down",
}
_TRES_GPUS = re.compile(r"(?:^|,)gres/gpu=(\d+)")
_GPU = re.compile(r"gpu:(?:([^:(,]+):)?(\d+)(?=$|[(,])")


@dataclass(frozen=True)
class SlurmPartition:
    """A partition as its users see it."""

    name: str
    nodes: str
    """A hostlist."""
    n_nodes: int
    is_default: bool
    is_up: bool
    max_time: timedelta | None
    """None is no limit."""
    default_time: timedelta | None
    max_nodes: int | None
    """Most nodes for one job; None is no limit."""
    preempt_mode: str = ""
    """What Slurm does with its jobs when it preempts them; empty if it does not show that."""
    topology: str | None = None
    """Name of its topology (topology.yaml); None is the cluster's default one."""
    cpus: int = 0
    """Of all its nodes."""
    gpus: int | None = None
    """Of all its nodes; None if Slurm does not count GPUs (AccountingStorageTRES)."""


@dataclass(frozen=True)
class Node:
    """A node and what Slurm knows of it."""

    name: str
    state: str
    """The base state, in lower case: idle, mixed, allocated, down, ..."""
    flags: frozenset[str]
    """What comes with it: drain, not_responding, ..."""
    gpus: int
    gpu_type: str | None
    """None if the site gives no type, or the node has several."""
    cpus: int
    memory_mb: int
    partitions: tuple[str, ...]
    reason: str
    """Why it is down or drained; empty otherwise."""

    @property
    def is_usable(self) -> bool:
        """Whether a job could run here now or after the present one."""
        return self.state in _USABLE and "not_responding" not in self.flags and not (self.flags & _UNUSABLE_FLAGS)

    @property
    def is_down(self) -> bool:
        """Whether Slurm starts nothing here, and runs nothing."""
        return self.state in _DOWN

    @property
    def is_draining(self) -> bool:
        """Whether an administrator, or a health check of the site, takes it out of use."""
        return "drain" in self.flags

    @property
    def trouble(self) -> str:
        """Slurm's state of a node that is not well; empty for one that is, and if Slurm does not know.

        A controller that was started again calls every node `unknown`, and not responding, until it registers.
        """
        flags = sorted(self.flags & {"not_responding", "fail"})
        if self.state == "unknown" or not (self.is_down or flags):
            return ""
        return " ".join([self.state, *flags]).replace("_", " ")


def usable_nodes(nodes: Iterable[Node], partitions: str) -> set[str]:
    """Return the names of the usable nodes of some partitions, given with commas between them."""
    partition_names = set(partitions.split(","))
    return {node.name for node in nodes if node.is_usable and partition_names & set(node.partitions)}


def parse_partitions(text: str) -> list[SlurmPartition]:
    """Read the answer of `scontrol --oneliner show partition`; its values hold no spaces."""
    partitions = []
    for line in text.splitlines():
        values = dict(word.split("=", 1) for word in line.split() if "=" in word)
        if "PartitionName" not in values:
            continue
        max_nodes = values.get("MaxNodes", "")
        gpus = _TRES_GPUS.search(values.get("TRES", ""))
        partitions.append(
            SlurmPartition(
                name=values["PartitionName"],
                nodes="" if values.get("Nodes") in (None, "(null)") else values["Nodes"],
                n_nodes=int(values.get("TotalNodes", "0")),
                is_default=values.get("Default") == "YES",
                is_up=values.get("State") == "UP",
                max_time=parse_duration(values.get("MaxTime", "")),
                default_time=parse_duration(values.get("DefaultTime", "")),
                max_nodes=int(max_nodes) if max_nodes.isdecimal() else None,
                preempt_mode=values.get("PreemptMode", ""),
                topology=values.get("Topology"),
                cpus=int(values.get("TotalCPUs", "0")),
                gpus=int(gpus[1]) if gpus else None,
            )
        )
    return partitions


def parse_nodes(text: str) -> list[Node]:
    """Read the answer of `sinfo --Node --noheader --Format=NODE_FORMAT`; a node of several partitions comes once.

    Raises:
        SlurmRefused: the fields are not the ones asked for.
    """
    rows: dict[str, dict[str, str]] = {}
    partitions: dict[str, list[str]] = {}
    for row in split_records(text, _NODE_FIELDS, "sinfo"):
        rows[row["NodeList"]] = row
        partitions.setdefault(row["NodeList"], []).append(row["PartitionName"])
    return [_node(row, tuple(partitions[name])) for name, row in rows.items()]


def parse_addresses(text: str) -> dict[str, tuple[str, int]]:
    """Read the answer of `sinfo --Node --noheader --Format=ADDRESS_FORMAT`: host and port of each node's slurmd.

    Raises:
        SlurmRefused: the fields are not the ones asked for.
    """
    rows = {row["NodeList"]: row for row in split_records(text, _ADDRESS_FIELDS, "sinfo")}
    return {
        name: (row["NodeAddr"], int(row["Port"]))
        for name, row in rows.items()
        if row["NodeAddr"] and row["Port"].isdecimal() and int(row["Port"]) > 0
    }


def count_gpus(gres: str) -> tuple[int, str | None]:
    """Return how many GPUs a node's GRES names, and their type if there is one.

    `gpu:mi300x:8(S:0-1)` is 8, mi300x.
    """
    matches = _GPU.findall(gres)
    types = {kind for kind, _ in matches}
    kind = types.pop() if len(types) == 1 else None
    return sum(int(count) for _, count in matches), kind or None


def parse_config(text: str) -> dict[str, str]:
    """Read the answer of `scontrol show config`: every setting, as text."""
    pairs = (line.split("=", 1) for line in text.splitlines() if "=" in line)
    return {name.strip(): value.strip() for name, value in pairs}


def _node(row: dict[str, str], partitions: tuple[str, ...]) -> Node:
    words = row["StateComplete"].lower().split("+")
    base = words[0].rstrip("".join(_SYMBOLS))
    symbols = {_SYMBOLS[character] for character in words[0][len(base) :]}
    gpus, gpu_type = count_gpus(row["Gres"])
    return Node(
        name=row["NodeList"],
        state=base,
        flags=frozenset(symbols | set(words[1:])),
        gpus=gpus,
        gpu_type=gpu_type,
        cpus=int(row["CPUs"]),
        memory_mb=int(row["Memory"]),
        partitions=partitions,
        reason="" if row["Reason"] == "none" else row["Reason"],
    )
