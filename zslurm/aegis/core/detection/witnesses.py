"""Whether a silent node is dead, by three witnesses who are asked at once.

1. **Its agent**, which misses heartbeats and does not answer. A stalled file system, a busy node or a stuck srun
   does that to a healthy node too.
2. **Its slurmd's port**, tried from the supervisor's node. An accepted connection shows a kernel that lives. A
   refused one does so too, but no slurmd: the site restarts it, or everything on the node was killed. Nothing
   comes back from a lost machine, or over a broken path.
3. **Its neighbours**: the same port, tried from other nodes by their agents, and what the ranks there show: that
   they lost peers, that no step is finished any more, or that steps are finished.

A node is dead if two of three call it gone and none has seen it live. So neither a stalled file system (its
kernel accepts connections) nor a slow agent is enough, nor a supervisor that is cut off itself: at least one
neighbour must have answered the question. If this rule does not decide, as if nobody knows the port, the longer
limits of dead_nodes.py do.

Pure: the questions are asked by supervisor/agents/inquiry.py.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import Literal

from zslurm.core.reach import Reach

RanksElsewhere = Literal["lost_peers", "halted", "moving", "unknown"]
"""What ranks on other nodes show: connections to peers broke; no step is finished for longer than steps take; a
step was finished after the question; none of these."""


@dataclass(frozen=True)
class WitnessReport:
    """What was answered about a node whose agent missed its heartbeat.

    Attributes:
        asked_at: when the question was asked (monotonic seconds). The agent has not been heard since.
        slurmd: how its slurmd's port answers the supervisor.
        neighbours: how that port answers other nodes, by node; only of agents that have answered.
    """

    asked_at: float
    slurmd: Reach = "unknown"
    neighbours: Mapping[str, Reach] = field(default_factory=dict)


class Vote(Enum):
    """What one witness shows of the node."""

    GONE = "gone"
    ALIVE = "alive"
    ABSTAINS = "abstains"


_SLURMD = {"refuses": "its slurmd refuses connections", "nothing": "its slurmd does not answer"}
_RANKS = {
    "lost_peers": "ranks elsewhere have lost their peers",
    "halted": "no rank elsewhere finishes a step",
}


def slurmd_vote(slurmd: Reach) -> Vote:
    """Return what its slurmd's port, asked by the supervisor, shows."""
    if slurmd == "answers":
        return Vote.ALIVE
    return Vote.ABSTAINS if slurmd == "unknown" else Vote.GONE


def neighbours_vote(neighbours: Mapping[str, Reach], ranks: RanksElsewhere) -> Vote:
    """Return what its neighbours and the ranks there show.

    A refused connection comes from a kernel that lives, so it takes the ranks to call the node gone.
    """
    seen = set(neighbours.values())
    if ranks == "moving" or "answers" in seen:
        return Vote.ALIVE
    if ranks in ("lost_peers", "halted"):
        return Vote.GONE
    return Vote.GONE if seen == {"nothing"} else Vote.ABSTAINS


def why_dead(report: WitnessReport, ranks: RanksElsewhere) -> str | None:
    """Return why a node whose agent is silent is dead; None if it may be alive."""
    if not report.neighbours:  # perhaps the supervisor is cut off
        return None
    slurmd, neighbours = slurmd_vote(report.slurmd), neighbours_vote(report.neighbours, ranks)
    if Vote.ALIVE in (slurmd, neighbours):
        return None
    if {report.slurmd, *report.neighbours.values()} == {"unknown"}:
        return None  # no connection was tried, and ranks elsewhere halt or lose peers for other reasons as well
    if neighbours is Vote.ABSTAINS and (slurmd is Vote.ABSTAINS or report.slurmd == "refuses"):
        return None
    reasons = ["its agent misses heartbeats"]
    if slurmd is Vote.GONE:
        reasons.append(_SLURMD[report.slurmd])
    if neighbours is Vote.GONE:
        reasons.append(_RANKS.get(ranks, "no neighbour reaches it"))
    return ", ".join(reasons[:-1]) + f" and {reasons[-1]}"
