"""Who and where: the node, GPU, NIC and rank that a line of a log names itself.

They stay apart: no rank becomes a node here, and no GPU a rank.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import NamedTuple

from zslurm.aegis.evidence import Scope


class Place(NamedTuple):
    """What a line names; see signatures.Match."""

    node: str | None
    gpu: str | None
    nic: str | None
    rank: int | None


_PCI = r"(?P<pci>[0-9a-f]{4,8}:[0-9a-f]{2}:[0-9a-f]{2}(?:\.[0-7])?)"
_NIC_DRIVERS = r"(?:ionic|mlx[45]_\w+|bnxt_\w+|ice|ixgbe|i40e|igb|irdma|qede?|cxgb4|tg3|r8169|e1000e)"
_ADDRESS = re.compile(
    rf"\b(?P<driver>amdgpu|{_NIC_DRIVERS}|NVRM: Xid \(PCI):? ?{_PCI}(?: (?P<name>[a-z]\w+):)?", re.I
)
_GPU = [
    re.compile(r"\bby (?:GPU|agent) node-(?P<kfd>\d+)"),
    re.compile(r"\bGPU\[? ?(?P<gpu>\d+)\]?(?= has\b|[:,;]|\s*$| is\b|\])"),
    re.compile(r"\b[Dd]evice:? (?P<gpu>\d+)\b|\b(?:cuda|hip):(?P<other>\d+)"),
]
_NIC = re.compile(
    r"\bhca (?P<a>\w+)|NET/\w+ ?: (?P<b>[a-z]\w+):\d+ |\bon (?P<c>[a-z]\w*_\d+):\d+/|\binterface (?P<d>[a-z]\w+)"
    r"|NETDEV WATCHDOG: (?P<e>[a-z]\w+) |/sys/class/infiniband/(?P<f>\w+)|^(?P<g>(?:en|eth|ib|benic|bond)\w*): ",
    re.IGNORECASE,
)
_HOST = r"(?P<node>[A-Za-z0-9][\w.\-\[\],]*[\w\]]|[A-Za-z0-9])"
_NODE = [
    re.compile(rf"(?:srun|step): error: {_HOST}: tasks?\b"),
    re.compile(rf"\bNode failure on {_HOST}|\bfailed on node {_HOST.replace('node', 'node2')}:"),
    re.compile(rf"\bON {_HOST} CANCELLED\b|\bon {_HOST.replace('node', 'node2')}: this job\b"),
    re.compile(rf"\b[Nn]ode(?:: |s? ){_HOST}(?=,| (?:is |are )?not responding|\s*$)"),
    re.compile(rf"^(?:\d+: )?[A-Z][a-z]{{2}} [ \d]\d \d\d:\d\d:\d\d {_HOST} [\w./-]+(?:\[\d+\])?:"),
    re.compile(rf"^(?:\d+: )?\d{{4}}-\d\d-\d\dT\S+ {_HOST} kernel:"),
    re.compile(rf"(?:^|[\s>]){_HOST}:\d+:\d+ \[\d+\]"),
]
_RANK = [
    re.compile(r"\[rank(\d+)\]", re.IGNORECASE),
    re.compile(r"\b[Rr]ank (\d+)\]"),
    re.compile(r"^\s*(\d{1,6}): "),
    re.compile(r"\b(?:[Rr]ank|RANK)[ =:]+(\d+)\b"),
    re.compile(r": tasks? (\d+)"),
]


def place_of(text: str, kind: str, scope: Scope) -> Place:
    """Who and where, as far as a line tells.

    Args:
        text: the line, with its labels and stamps.
        kind: of the fault that it tells of.
        scope: of that fault, which says whether a number is a GPU's and a name a NIC's.
    """
    gpu = nic = None
    if address := _ADDRESS.search(text):
        if address["driver"].lower().startswith(("amdgpu", "nvrm")):
            gpu = address["pci"]
        else:
            nic = address["name"] or address["pci"]
    if scope == "gpu" or kind in ("gpu_oom", "nan_loss"):
        gpu = gpu or _first(_GPU, text)
    if scope in ("nic", "fabric") or kind in ("net_config", "benign_after_fault"):
        nic = nic or _first([_NIC], text)
    rank = _first(_RANK, text)
    return Place(_first(_NODE, text), gpu, nic, int(rank) if rank else None)


def _first(patterns: Sequence[re.Pattern[str]], text: str) -> str | None:
    for pattern in patterns:
        if found := pattern.search(text):
            name = found.lastgroup
            value = found[name or 1]
            return f"kfd:{value}" if name == "kfd" else value
    return None
