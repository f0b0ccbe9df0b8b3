"""Do the clocks agree?

Timestamps are exchanged through Slurm's own I/O. The answer was sent before it came, and the task was handed out
before the node began. So with s and r, the sending and the coming by the clock here, and b and e, the beginning
and the end by the clock there, the node's clock is ahead by something between e - r and b - s: as wide as the
start of the job was long. Nodes among themselves are compared by e - r, which is wrong by an answer's travel only.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping

from zslurm.doctor.check import Check, NodeData, Outcome, failed, passed
from zslurm.hardware.node_sources import Sources

_REMEDY = "ask for chrony or ntpd on this node; logs and checkpoints' ages are wrong meanwhile"


def check(sources: Sources) -> Outcome | None:
    """Nothing is wrong with a clock alone: `compare` looks at all of them."""
    if sources.cluster.launcher == "local":
        return None
    return passed("the clock was read")


def compare(nodes: Mapping[str, NodeData], sources: Sources) -> Mapping[str, Outcome]:
    """Each node's clock against the login node's and against the other nodes'."""
    limit = sources.limits.clock_skew_s
    if not nodes:
        return {}
    ahead_at_least = {name: node.ended - node.received for name, node in nodes.items()}
    typical = statistics.median(ahead_at_least.values())
    found = {}
    for name, node in nodes.items():
        low, high = ahead_at_least[name], node.began - node.sent
        among = low - typical
        shown = f"between {low:+.2f} and {high:+.2f} s ahead of here, {among:+.2f} s from most nodes"
        wrong = low > limit or high < -limit or (len(nodes) > 2 and abs(among) > limit)
        found[name] = failed(f"the clock is {shown}", _REMEDY) if wrong else passed(shown)
    return found


CHECK = Check("clock", "system", "clocks of nodes against this machine's and each other's", "node", check, compare)
