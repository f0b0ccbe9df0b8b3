"""The events that say where a run stands, read without parsing the others.

A run of some weeks writes tens of thousands of events, most of them about single ranks and sensors; `status` reads
the files of all runs. Of an ordinary line only the kind is looked at. Then, from the milestones: the last cause,
the last decision, the excluded nodes.
"""

from __future__ import annotations

import re
import time
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from zslurm.core.errors import ZslurmError
from zslurm.slurm.hostlist import expand
from zslurm.train.jsonl import parse_line

_KINDS = frozenset(
    b"supervisor_started attempt_started attempt_ended run_ended successor_ended decision nodes_excluded "
    b"exclusion_failed requeued preempted".split()
)
_EVENT = re.compile(rb'"event":\s?"(\w+)"')
_HEAD = 200
"""The kind is one of the first fields of a line."""
_LAST = 8

IN_PLACE = ("restart", "swap", "shrink")
"""Actions that start the ranks again in the same job."""


@dataclass(frozen=True)
class Milestones:
    """
    Attributes:
        rows: the events that say where the run stands, oldest first.
        newest: the newest event of any kind.
    """

    rows: Sequence[dict[str, Any]] = ()
    newest: dict[str, Any] | None = None


def read_milestones(path: Path) -> Milestones:
    """The milestones of `events.jsonl`; none where there is no such file. Damaged lines are skipped."""
    rows: list[dict[str, Any]] = []
    last: deque[bytes] = deque(maxlen=_LAST)
    try:
        with path.open("rb") as file:
            for line in file:
                last.append(line)
                kind = _EVENT.search(line, 0, _HEAD)
                if (
                    (kind is None or kind[1] in _KINDS)
                    and (row := parse_line(line)) is not None
                    and "event" in row
                ):
                    rows.append(row)
    except FileNotFoundError:
        return Milestones()
    newest = next((row for line in reversed(last) if (row := parse_line(line)) is not None), None)
    return Milestones(rows, newest)


@dataclass(frozen=True)
class AegisView:
    """What Aegis noticed and did, as `status` tells it.

    Attributes:
        last_cause: what the last failure in this job is blamed on: `message`, `attempt`, `time`, and where known
            `kind`, `rank`, `node`, `gpu`, `nic`, `step`, `exit_code`.
        last_decision: the newest event `decision` of this job, without its evidence.
        excluded: nodes that the run does not use now.
        preempted: the event `preempted` of this job, where no attempt has started since.
        restarts_in_place: how often the ranks were started again without Slurm's queue, in this job.
    """

    last_cause: dict[str, Any] | None = None
    last_decision: dict[str, Any] | None = None
    excluded: tuple[str, ...] = ()
    preempted: dict[str, Any] | None = None
    restarts_in_place: int = 0


def aegis_view(rows: Sequence[dict[str, Any]], job_id: str, now: float | None = None) -> AegisView:
    """What the milestones say of a job and of its run's nodes.

    Args:
        rows: the milestones.
        job_id: the run's present job.
        now: UNIX seconds, to tell which exclusions have expired; default: now.
    """
    mine = [row for row in rows if row.get("job_id") == job_id]
    decisions = [row for row in mine if row["event"] == "decision"]
    done = [row for row in decisions if row.get("mode", "act") == "act" and row.get("action") in IN_PLACE]
    return AegisView(
        last_cause=_last_cause(mine),
        last_decision=without_evidence(decisions[-1]) if decisions else None,
        preempted=_preempted(mine),
        excluded=_excluded(rows, job_id, time.time() if now is None else now),
        restarts_in_place=len(done),
    )


def _preempted(rows: Sequence[dict[str, Any]]) -> dict[str, Any] | None:
    """The preemption that the run has not come back from."""
    found: dict[str, Any] | None = None
    for row in rows:
        if row["event"] == "preempted":
            found = row
        elif row["event"] == "attempt_started":
            found = None
    return found


def without_evidence(decision: Mapping[str, Any]) -> dict[str, Any]:
    """A decision without what it was taken on: every fault of the attempt, which is for a replay of it."""
    return {name: value for name, value in decision.items() if name not in ("situation", "resources")}


def cause_of(row: Mapping[str, Any]) -> dict[str, Any] | None:
    """The cause that an event of an end holds; None where it holds none, or a damaged one without a message."""
    cause = row.get("cause")
    if not isinstance(cause, dict) or not cause.get("message"):
        return None
    if cause.get("step") is None or isinstance(cause["step"], int | float):
        return cause
    return {name: value for name, value in cause.items() if name != "step"}


def _last_cause(rows: Sequence[dict[str, Any]]) -> dict[str, Any] | None:
    """The cause of the newest failed attempt; what the decision after it blames wins, for that knows more."""
    cause: dict[str, Any] | None = None
    for row in rows:
        told: object = None
        if row["event"] in ("attempt_ended", "run_ended"):
            told = cause_of(row)
        elif row["event"] == "decision" and isinstance(root := row.get("root"), dict):
            told = {**root, "message": root.get("line") or root.get("kind")}
        if not isinstance(told, dict) or not told.get("message"):
            continue
        if row["event"] == "run_ended" and cause is not None and cause["message"] == told["message"]:
            continue  # it repeats the last attempt's
        names = ("message", "kind", "rank", "node", "gpu", "nic", "step", "exit_code")
        known = {name: told[name] for name in names if told.get(name) is not None}
        attempt = row.get("attempt", cause["attempt"] if cause is not None else None)
        cause = known | {"attempt": attempt, "time": row.get("time")}
    return cause


def _excluded(rows: Sequence[dict[str, Any]], job_id: str, now: float) -> tuple[str, ...]:
    """Nodes whose exclusion has not expired; one without an end holds for the job that excluded them."""
    until: dict[str, float] = {}
    for row in rows:
        if row["event"] not in ("nodes_excluded", "exclusion_failed"):
            continue
        expires = row.get("expires")
        if not isinstance(expires, int | float):
            expires = float("inf") if row.get("job_id") == job_id else 0.0
        for node in _names(row.get("nodes")):
            until[node] = expires if row["event"] == "nodes_excluded" else 0.0
    return tuple(node for node, end in until.items() if end > now)


def _names(nodes: object) -> list[str]:
    """Nodes of an event: a hostlist, or a list of names."""
    if isinstance(nodes, list):
        return [str(node) for node in nodes]
    try:
        return expand(nodes) if isinstance(nodes, str) else []
    except ZslurmError:
        return []
