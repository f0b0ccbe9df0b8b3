"""Which nodes the other runs of a group exclude, what a run takes over of that, and what it gives up again."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from zslurm.run.events import Decided, NodesExcluded, NodesReadmitted, Readmitted
from zslurm.run.events.event import Event
from zslurm.run.events.event_text import node_names
from zslurm.run.exclusions import active_exclusions, exclusions_in
from zslurm.slurm.hostlist import compress


@dataclass(frozen=True)
class SharedExclusion:
    """A node that a run of the group does not use.

    Attributes:
        node: its name.
        cluster: Slurm's name of the cluster; names of nodes say nothing on another one.
        user: who submitted the run.
        run: path of the run's directory.
        reason: one line.
        since: UNIX seconds.
        expires: UNIX seconds.
    """

    node: str
    cluster: str
    user: str
    run: str
    reason: str
    since: float
    expires: float

    @property
    def origin(self) -> str:
        """Who excluded the node, for messages: `run night of ann`."""
        return f"run {Path(self.run).name} of {self.user}"


def active_by_node(
    exclusions: Iterable[SharedExclusion], now: float, *, run: Path | None = None
) -> dict[str, SharedExclusion]:
    """Return each node that must not be used at `now` (UNIX seconds), with the exclusion that ends last.

    What `run` has shared itself is left out: its events have it.
    """
    own_path = None if run is None else str(run.absolute())
    by_node: dict[str, SharedExclusion] = {}
    for exclusion in exclusions:
        if exclusion.run == own_path or exclusion.expires <= now:
            continue
        if exclusion.node not in by_node or exclusion.expires > by_node[exclusion.node].expires:
            by_node[exclusion.node] = exclusion
    return by_node


EXCLUSION_EVENTS: tuple[type[Event], ...] = (NodesExcluded, NodesReadmitted, Decided, Readmitted)
"""What `take_over` needs to know of a run."""


def take_over(
    events: Iterable[Event], shared: Iterable[SharedExclusion], run: Path, now: float
) -> list[NodesExcluded | NodesReadmitted]:
    """Return the events with which a run follows its group: new exclusions, and those that the group gave up.

    A node that the run excludes already, for whatever reason, stays as it is. One that a person allowed this run
    to use again is excluded only by what was shared after that.

    Args:
        events: `EXCLUSION_EVENTS` of the run, oldest first.
        shared: what the store holds for the cluster.
        run: the run's directory; what the run shared itself is not news.
        now: UNIX seconds.
    """
    selected = list(events)
    active = active_exclusions(exclusions_in(selected), now)
    allowed: dict[str, float] = {}
    for event in selected:
        if isinstance(event, Readmitted) and "time" in vars(event):
            allowed |= dict.fromkeys(node_names(event.nodes), event.time)
    by_group = active_by_node(shared, now, run=run)
    news: dict[tuple[str, float], list[str]] = {}
    for node, exclusion in by_group.items():
        if node not in active and exclusion.since > allowed.get(node, -1.0):
            news.setdefault((f"{exclusion.origin}: {exclusion.reason}", exclusion.expires), []).append(node)
    taken: list[NodesExcluded | NodesReadmitted] = [
        NodesExcluded(nodes=compress(nodes), reason=reason, expires=expires, shared=True)
        for (reason, expires), nodes in news.items()
    ]
    given_up = [node for node, exclusion in active.items() if exclusion.shared and node not in by_group]
    return [*taken, NodesReadmitted(nodes=compress(given_up))] if given_up else taken
