"""What `sbatch --test-only` says: when and where a job would start."""

from __future__ import annotations

import re
from dataclasses import dataclass
from datetime import UTC, datetime

_START = re.compile(
    r"Job \d+ to start at (?P<time>\S+) .*?\bon (?:nodes? )?(?P<nodes>\S+)(?: in partition (?P<part>\S+))?"
)


@dataclass(frozen=True)
class StartEstimate:
    """Where and when; the time is in UTC, and a promise only as far as running jobs end by their limits."""

    time: datetime
    nodes: str
    partition: str | None


def parse_estimate(text: str) -> StartEstimate | None:
    """The estimate in sbatch's words, which were written with TZ=UTC; None where there is none."""
    found = _START.search(text)
    if found is None:
        return None
    try:
        start = datetime.fromisoformat(found["time"]).replace(tzinfo=UTC)
    except ValueError:
        return None
    return StartEstimate(start, found["nodes"], found["part"])
