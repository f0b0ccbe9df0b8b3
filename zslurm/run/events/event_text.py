"""Parts of the sentences that describe events: causes, faults, nodes and ranks in words."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import lru_cache
from typing import Any

from zslurm.core.errors import ZslurmError
from zslurm.slurm.hostlist import compress, expand

_ACRONYMS = {
    word.lower(): word
    for word in "GPU NIC RAS OOM NaN XGMI PCIe RCCL NCCL IO ECC CPU memlock xGMI SIGSEGV".split()
}

ROLES = {
    "root": "fault",
    "cascade": "follows from another fault",
    "teardown": "part of the end that was asked for",
    "advisory": "to note",
    "benign": "harmless",
}
"""What a fault is, by its role."""


def describe_cause(cause: Mapping[str, Any]) -> str:
    """Return the root of a failure in one line: who, when, what."""
    where = [f"rank {cause['rank']}" if cause.get("rank") is not None else ""]
    where.append(f"on {cause['node']}" if cause.get("node") else "")
    where.append(f"after step {cause['step']}" if (cause.get("step") or -1) > 0 else "")
    location = " ".join(word for word in where if word)
    return f"{location}: {cause['message']}" if location else str(cause["message"])


def cause_of(row: Mapping[str, Any]) -> dict[str, Any] | None:
    """Return the cause in a row of an end; None if it has none, or a damaged one without a message."""
    cause = row.get("cause")
    if not isinstance(cause, dict) or not cause.get("message"):
        return None
    if cause.get("step") is None or isinstance(cause["step"], int | float):
        return cause
    return {name: value for name, value in cause.items() if name != "step"}


@lru_cache(maxsize=256)
def kind_text(kind: str) -> str:
    """Return `gpu_ras_uncorrectable` as `GPU RAS uncorrectable`."""
    return " ".join(_ACRONYMS.get(word, word) for word in kind.split("_"))


def describe_fault(fault: Mapping[str, Any]) -> str:
    """Return a fault in one line: what, where, and the line that shows it."""
    get = fault.get
    node, gpu, nic, rank, step, line = get("node"), get("gpu"), get("nic"), get("rank"), get("step"), get("line")
    location = f" on {node}" if node else ""
    if gpu is not None:
        location += f", GPU {gpu}"
    if nic is not None:
        location += f", NIC {nic}"
    if rank is not None:
        location += f", rank {rank}"
    after = f" after step {step}" if (step or -1) > 0 else ""
    return f"{kind_text(str(fault['kind']))}{location}{after}{f': {line}' if line else ''}"


def node_list(nodes: object) -> str:
    """Return nodes, in an event a hostlist or a list of names, as a hostlist."""
    return nodes if isinstance(nodes, str) else compress(map(str, nodes)) if isinstance(nodes, Iterable) else "?"


def node_names(nodes: object) -> list[str]:
    """Return the names of the nodes of an event, a list or a hostlist; none if it is neither."""
    if isinstance(nodes, list | tuple):
        return [str(node) for node in nodes]
    try:
        return expand(nodes) if isinstance(nodes, str) else []
    except ZslurmError:
        return []


def rank_list(ranks: list[Any]) -> str:
    """Return the first ranks by number, and how many more there are."""
    shown = ", ".join(map(str, ranks[:8])) + (f" and {len(ranks) - 8} more" if len(ranks) > 8 else "")
    return f"{'rank' if len(ranks) == 1 else 'ranks'} {shown}"
