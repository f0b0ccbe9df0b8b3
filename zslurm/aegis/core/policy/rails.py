"""What follows if rails of a job's nodes are not whole, before its ranks start."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Literal

from zslurm.checkpoint_tools.quantities import counted
from zslurm.cluster.rails.types import RailMap
from zslurm.slurm.hostlist import compress

Policy = Literal["exclude", "refuse", "warn"]
Action = Literal["start", "refuse", "exclude"]


@dataclass(frozen=True)
class RailDecision:
    """What to do now.

    Attributes:
        action: start the ranks; stop for good; or exclude `nodes` and requeue.
        reason: one line that names node and NIC; empty if nothing is wrong.
        nodes: the faulty nodes.
    """

    action: Action
    reason: str = ""
    nodes: tuple[str, ...] = ()


def describe_rails(incomplete: Mapping[str, RailMap]) -> str:
    """Return every fault of the first node, and how many others have some: `node3: rail 6: ionic_6 is DOWN`."""
    first, *others = incomplete.values()
    messages = "; ".join(problem.message for problem in first.incomplete)
    more = f" (and faults on {compress(node_map.node for node_map in others)})" if others else ""
    return f"{first.node}: {messages}{more}"


def decide_rails(
    policy: Policy,
    incomplete: Mapping[str, RailMap],
    *,
    needed: int,
    usable: Collection[str] | None = (),
    demanded: Collection[str] = (),
    excluded_before: Collection[str] = (),
) -> RailDecision:
    """Return what to do about nodes whose rails are incomplete. It never excludes a node twice, so it never loops.

    Args:
        policy: `cluster.rail_policy`.
        incomplete: the faulty nodes of the job and their maps.
        needed: nodes that the run needs.
        usable: nodes on which the job could run, now or later, without those that it excludes already; None
            if the site hides its nodes.
        demanded: nodes that the job insists on (`slurm.nodelist`).
        excluded_before: nodes that were excluded from this job for this reason.
    """
    if not incomplete:
        return RailDecision("start")
    reason, faulty = describe_rails(incomplete), tuple(incomplete)
    if policy != "exclude":
        return RailDecision("start" if policy == "warn" else "refuse", reason, faulty)
    usable_left = needed if usable is None else len(set(usable) - set(faulty))
    if back := set(faulty) & set(excluded_before):
        why = f"{compress(back)} was excluded before and is in the job again"
    elif demanded_faulty := set(faulty) & set(demanded):
        why = f"slurm.nodelist demands {compress(demanded_faulty)}, so it cannot be excluded"
    elif usable_left < needed:
        shown = counted(usable_left, "usable node is", "usable nodes are")
        why = f"without it {shown} left, and the run needs {needed}"
    else:
        return RailDecision("exclude", reason, faulty)
    return RailDecision("refuse", f"{reason}; {why}", faulty)
