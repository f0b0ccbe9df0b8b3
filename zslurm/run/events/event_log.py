"""What happened to runs, and what people did to them, in order of time: as it was recorded, and as it is added."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from zslurm.run.run_dir import RunDir
from zslurm.train.jsonl import JsonLinesTail


class EventLog:
    """The events and submissions of some runs."""

    def __init__(self, runs: Sequence[RunDir]) -> None:
        """Begin before the first event."""
        self._tails = [(run, JsonLinesTail(path)) for run in runs for path in (run.submissions, run.events)]

    def news(self, *, since: float | None = None) -> list[tuple[RunDir, dict[str, Any]]]:
        """Return the rows that no call returned before, oldest first; with `since` those from that time on."""
        found = [(run, event) for run, tail in self._tails for event in tail.new_records()]
        if since is not None:
            found = [pair for pair in found if time_of(pair[1]) >= since]
        return sorted(found, key=lambda pair: time_of(pair[1]))


def time_of(event: Mapping[str, Any]) -> float:
    """Return when something happened (UNIX seconds); 0 where a damaged row does not have it."""
    return float(event.get("time") or 0.0)
