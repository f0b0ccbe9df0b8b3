"""The nodes that a run does not use, read from its events.

The policy, the job's script, `status` and `cluster exclude` read them here: what one of them avoids, all of them
avoid and show.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from zslurm.run.events import Decided, NodesExcluded, NodesReadmitted, Readmitted
from zslurm.run.events.event import Event, select
from zslurm.run.events.event_text import node_names
from zslurm.run.run_dir import RunDir
from zslurm.train.jsonl import read_jsonl

UNSTATED_S = 7 * 86400.0
"""Seconds that an exclusion lasts if no event states its end: the supervisor died between
its decision and the record of the exclusion. The default of `aegis.exclude_for_s`."""


@dataclass(frozen=True)
class Exclusion:
    """Nodes that the run must not use for some time.

    Attributes:
        nodes: their names.
        reason: one line.
        since: UNIX seconds.
        expires: UNIX seconds; from then on the run may use them again.
        shared: another run of the group excluded them (`cluster.exclusions`).
    """

    nodes: tuple[str, ...]
    reason: str
    since: float
    expires: float
    shared: bool = False

    def is_active(self, now: float) -> bool:
        """Return whether the nodes must not be used at `now` (UNIX seconds)."""
        return now < self.expires


def exclusions_in(events: Iterable[Event], readmitted: Mapping[str, float] | None = None) -> dict[str, Exclusion]:
    """Return each node that was excluded, with its newest exclusion, expired ones among them.

    Nodes that a decision excludes count from the decision on: the supervisor may die before it records them. Nodes
    that a person, or the group, allowed again after their exclusion are left out.

    Args:
        events: of `events.jsonl`, and of `submissions.jsonl` if `readmitted` is not known, in any order.
        readmitted: nodes that a person allowed again, and when (UNIX seconds).
    """
    newest: dict[str, Exclusion] = {}
    allowed = dict(readmitted or {})
    complete = (event for event in events if "time" in vars(event))  # the others are damaged
    for event in sorted(complete, key=lambda event: event.time):
        if isinstance(event, Readmitted | NodesReadmitted):
            allowed |= dict.fromkeys(node_names(event.nodes), event.time)
            continue
        nodes: tuple[str, ...] = ()
        expires: float | None = None
        shared = False
        if isinstance(event, NodesExcluded):
            nodes, expires, shared = tuple(node_names(event.nodes)), event.expires, bool(event.shared)
        elif isinstance(event, Decided) and event.acted:
            nodes = tuple(event.exclude or ())
        until = event.time + UNSTATED_S if expires is None else expires
        newest |= dict.fromkeys(nodes, Exclusion(nodes, event.reason or "", event.time, until, shared))
    return {node: exclusion for node, exclusion in newest.items() if exclusion.since > allowed.get(node, -1.0)}


def read_exclusions(run: RunDir) -> dict[str, Exclusion]:
    """Return each node that a run excluded, from its files.

    Raises:
        OSError: they cannot be read.
    """
    rows = [*read_jsonl(run.events), *read_jsonl(run.submissions)]
    return exclusions_in(select(rows, NodesExcluded, NodesReadmitted, Decided, Readmitted))


def active_exclusions(exclusions: Mapping[str, Exclusion], now: float) -> dict[str, Exclusion]:
    """Return the nodes that must not be used at `now` (UNIX seconds), each with its exclusion."""
    return {node: exclusion for node, exclusion in exclusions.items() if exclusion.is_active(now)}


def excluded_by_run(exclusions: Mapping[str, Exclusion], now: float) -> set[str]:
    """Return the nodes that count towards `aegis.max_excluded`: not those of other runs of the group."""
    return {node for node, exclusion in active_exclusions(exclusions, now).items() if not exclusion.shared}
