"""Who and where: the node, GPU, NIC and rank that a line of a log names itself.

They stay apart: no rank becomes a node here, and no GPU a rank.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from itertools import islice
from typing import NamedTuple

from zslurm.aegis.fault_kinds import BENIGN_AFTER_FAULT, GPU_OOM, NAN_LOSS, NET_CONFIG, FaultKind
from zslurm.aegis.logs.hardware_names import NIC_DRIVERS
from zslurm.aegis.types import Scope


class Location(NamedTuple):
    """What a line names; see signatures.Match."""

    node: str | None
    gpu: str | None
    nic: str | None
    rank: int | None


_LINES_OF_SUMMARY = 6
_PCI = r"(?P<pci>[0-9a-f]{4,8}:[0-9a-f]{2}:[0-9a-f]{2}(?:\.[0-7])?)"
_ADDRESS = re.compile(
    rf"\b(?P<driver>amdgpu|{NIC_DRIVERS}|NVRM: Xid \(PCI):? ?{_PCI}(?: (?P<name>[a-z]\w+):)?", re.I
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
    re.compile(rf"\bprocess rank \d+ with PID \d+ on node {_HOST}"),  # Open MPI's mpirun and prterun
    re.compile(rf"\bRUNNING AT {_HOST}"),  # MPICH's mpiexec
    re.compile(rf"^\s*host +: {_HOST}\s*$"),  # torchrun
    re.compile(rf"\bpdsh@\S+: {_HOST}: "),  # DeepSpeed's launcher
    re.compile(rf"\bnode name: {_HOST} has been marked|\bat node \(ID: \w+, IP: {_HOST.replace('node', 'node2')}"),
    re.compile(rf"(?:slurmstepd:|\d\]) error: +(?:mpi/\w+: \w+: )?{_HOST} \[\d+\]"),
    re.compile(rf"\b[Nn]ode(?:: |s? ){_HOST}(?=,| (?:is |are )?not responding|\s*$)"),
    re.compile(rf"^(?:\d+: )?[A-Z][a-z]{{2}} [ \d]\d \d\d:\d\d:\d\d {_HOST} [\w./-]+(?:\[\d+\])?:"),
    re.compile(rf"^(?:\d+: )?\d{{4}}-\d\d-\d\dT\S+ {_HOST} kernel:"),
    re.compile(rf"(?:^|[\s>]){_HOST}:\d+:\d+ \[\d+\]"),
]
_RANK = [
    re.compile(r"\[rank(\d+)\]", re.IGNORECASE),
    re.compile(r"\bProcess name: \[\S+,(\d+)\]"),  # Open MPI: [[job,step],rank], [prterun-host-pid@1,rank]
    re.compile(r"\b[Rr]ank (\d+)\]"),
    re.compile(r"^\s*(\d{1,6}): "),
    re.compile(r"\b(?:[Rr]ank|RANK)[ =:]+(\d+)\b"),
    re.compile(r": tasks? (\d+)"),
]


_OF_SUMMARY = re.compile(
    r"^\s*(?:(?:exitcode|error_file|traceback|Exit code) *: |signal \d+ \(|= +(?:EXIT CODE|KILLED BY SIGNAL): )"
)
_START_OF_SUMMARY = re.compile(r"Root Cause|^\s*\[\d+\]:|^[-=]{20,}")


def location_in_summary(text: str, above: Iterable[str]) -> Location | None:
    """Return who and where by the lines above, for a line of a launcher's summary that does not name them itself.

    torchrun writes `host`, `rank` and `exitcode` on separate lines, and so does MPICH; Open MPI breaks its line
    before the signal.
    `text` is the line without labels; `above` are the lines before it, the nearest first.
    """
    if not _OF_SUMMARY.match(text):
        return None
    node = rank = None
    for line in islice(above, _LINES_OF_SUMMARY):
        if _START_OF_SUMMARY.search(line):
            break
        node = node or _first(_NODE, line)
        rank = rank or _first(_RANK, line)
    return Location(node, None, None, int(rank) if rank else None)


def location_of(text: str, kind: FaultKind, scope: Scope) -> Location:
    """Return who and where, as far as a line (with its labels and stamps) names them.

    The scope of the fault decides whether a number is a GPU's and a name a NIC's.
    """
    gpu = nic = None
    if address := _ADDRESS.search(text):
        if address["driver"].lower().startswith(("amdgpu", "nvrm")):
            gpu = address["pci"]
        else:
            nic = address["name"] or address["pci"]
    if scope == "gpu" or kind in (GPU_OOM, NAN_LOSS):
        gpu = gpu or _first(_GPU, text)
    if scope in ("nic", "fabric") or kind in (NET_CONFIG, BENIGN_AFTER_FAULT):
        nic = nic or _first([_NIC], text)
    rank = _first(_RANK, text)
    return Location(_first(_NODE, text), gpu, nic, int(rank) if rank else None)


def _first(patterns: Sequence[re.Pattern[str]], text: str) -> str | None:
    for pattern in patterns:
        if match := pattern.search(text):
            name = match.lastgroup
            value = match[name or 1]
            return f"kfd:{value}" if name == "kfd" else value
    return None
