"""Before the ranks start: are the rails of every node of the job whole?

A job whose rank 6 of node 17 has no network hangs in its first all-to-all, minutes after a thousand ranks were
started, and every rank is suspect. So the nodes are asked first (one Slurm step, one task each), where the
profile knows the rails. `cluster.rail_policy` says what follows. What is decided is a pure function of what was
found.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Literal

from zslurm.checkpoint_tools.quantities import counted
from zslurm.cluster.rails.types import RailMap
from zslurm.slurm.hostlist import compress

Policy = Literal["exclude", "refuse", "warn"]


@dataclass(frozen=True)
class Decision:
    """What to do now.

    Attributes:
        action: start the ranks; stop for good; or exclude `nodes` and requeue.
        node: the first of the faulty nodes; None where there is none.
        reason: one line that names node and NIC; empty where nothing is wrong.
    """

    action: Literal["start", "refuse", "exclude"]
    reason: str = ""
    node: str | None = None
    nodes: tuple[str, ...] = ()


def faults(incomplete: Mapping[str, RailMap]) -> str:
    """Return every fault of the first node, and how many others have some: `node3: rail 6: ionic_6 is DOWN`."""
    if not incomplete:
        return ""
    first, *others = incomplete.values()
    found = "; ".join(problem.message for problem in first.incomplete)
    more = f" (and faults on {compress(other.node for other in others)})" if others else ""
    return f"{first.node}: {found}{more}"


def decide(
    policy: Policy,
    incomplete: Mapping[str, RailMap],
    *,
    needed: int,
    usable: Collection[str] = (),
    demanded: Collection[str] = (),
    excluded_before: Collection[str] = (),
) -> Decision:
    """Return what to do about nodes whose rails are incomplete. It never excludes a node twice, so it never loops.

    Args:
        policy: `cluster.rail_policy`.
        incomplete: the faulty nodes of the job and their maps.
        needed: nodes that the run needs.
        usable: nodes on which the job could run, now or later, without those that it excludes already.
        demanded: nodes that the job insists on (`slurm.nodelist`).
        excluded_before: nodes that were excluded from this job for this reason.
    """
    if not incomplete:
        return Decision("start")
    reason, faulty = faults(incomplete), tuple(incomplete)

    def decision(action: Literal["start", "refuse", "exclude"], why: str = "") -> Decision:
        return Decision(action, f"{reason}; {why}" if why else reason, faulty[0], faulty)

    if policy == "warn":
        return decision("start")
    if policy == "refuse":
        return decision("refuse")
    if back := set(faulty) & set(excluded_before):
        return decision("refuse", f"{compress(back)} was excluded before and is in the job again")
    if wanted := set(faulty) & set(demanded):
        return decision("refuse", f"slurm.nodelist demands {compress(wanted)}, so it cannot be excluded")
    left = len(set(usable) - set(faulty))
    if left < needed:
        return decision(
            "refuse",
            f"without it {counted(left, 'usable node is', 'usable nodes are')} left, and the run needs {needed}",
        )
    return decision("exclude")
