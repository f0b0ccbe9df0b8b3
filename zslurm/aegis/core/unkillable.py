"""Processes of an attempt that were killed and are not gone: how long they are waited for, and what they show.

On one node they get ten minutes (ten times aegis.teardown_s); then the node is broken, and not used again. On
several it is hardly they, but what they share: no node is excluded, and they get an hour (60 times). What is left
there after that is Slurm's to end: the job is requeued, and gets no node on which Slurm could not end everything.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping

from zslurm.aegis.fault_kinds import ORPHANS, ORPHANS_MANY, STORAGE_FAULT
from zslurm.aegis.types import Fault
from zslurm.slurm.hostlist import compress

_ONE_NODE, _SEVERAL_NODES = 10, 60
"""How many times aegis.teardown_s killed processes get to die if they are left on one node, or on several."""


def patience_s(nodes: int, teardown_s: float) -> float:
    """Return the seconds that processes get to die that were left on a number of nodes at once."""
    return (_SEVERAL_NODES if nodes > 1 else _ONE_NODE) * teardown_s


def faults_of_unkillable(most: Collection[str], remaining: Mapping[str, str], wall: float) -> list[Fault]:
    """Return a fault for what held processes up on several nodes, and one for those that stay.

    Args:
        most: the nodes on which processes were left when they were on most nodes.
        remaining: the nodes on which they stay, with the reason.
        wall: when they were noticed (UNIX seconds).
    """
    faults = []
    if len(most) > 1:
        line = f"killed processes could not die on {compress(most)}: they wait for what these nodes share"
        faults.append(Fault.of_kind(STORAGE_FAULT, wall, "agent", line))
    if len(remaining) > 1:
        line = f"they cannot be killed on {compress(remaining)}"
        faults.append(Fault.of_kind(ORPHANS_MANY, wall, "agent", line))
    for node, why in remaining.items() if len(remaining) == 1 else ():
        faults.append(Fault.of_kind(ORPHANS, wall, "agent", f"they cannot be killed: {why}", node=node))
    return faults
