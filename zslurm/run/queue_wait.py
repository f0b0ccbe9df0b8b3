"""Whether a run waits in the queue for longer than expected, from its events.

Expected is what is set (`aegis.expected_wait_s`), else what Slurm estimated when the run was submitted, else the
median of the waits that the run has had. A wait is too long after twice that, and ten minutes more at least.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence

from zslurm.checkpoint_tools.quantities import show_duration
from zslurm.run.events import AttemptStarted, QueueOverdue, Released, Requeued, RequeuedByUser, Submitted
from zslurm.run.events.event import Event, select
from zslurm.run.run_dir import RunDir
from zslurm.train.jsonl import read_jsonl

_LEAST_S = 600.0
_KINDS = (Submitted, Released, Requeued, RequeuedByUser, AttemptStarted, QueueOverdue)


def read_waits(run: RunDir) -> list[Event]:
    """Return the events of a run from which `why_overdue` finds how long it has waited.

    Raises:
        OSError: its files cannot be read.
    """
    return list(select([*read_jsonl(run.events), *read_jsonl(run.submissions)], *_KINDS))


def why_overdue(events: Sequence[Event], now: float, *, set_s: float | None = None) -> str:
    """Return in one line that a run waits for too long; empty if it does not, or that was recorded for this wait.

    Args:
        events: of `events.jsonl` and `submissions.jsonl`.
        now: UNIX seconds.
        set_s: the expected wait as set (`aegis.expected_wait_s`).
    """
    ordered = [event for event in events if isinstance(event, _KINDS) and event.time]
    ordered.sort(key=lambda event: event.time)
    waits: list[float] = []
    since: Event | None = None
    is_recorded = False
    for event in ordered:
        if isinstance(event, QueueOverdue):
            is_recorded = True
        elif isinstance(event, AttemptStarted):
            if since is not None:
                waits.append(event.time - since.time)
            since = None
        else:
            since, is_recorded = event, False
    if since is None or is_recorded:
        return ""
    expected, source = _expected(since, waits, set_s)
    waited = now - since.time
    if expected is None or waited <= expected + max(_LEAST_S, expected):
        return ""
    return f"for {show_duration(waited)}; expected were {show_duration(expected)} ({source})"


def _expected(since: Event, waits: Sequence[float], set_s: float | None) -> tuple[float | None, str]:
    if set_s is not None:
        return set_s, "aegis.expected_wait_s"
    if isinstance(since, Submitted) and since.expected_start is not None:
        return max(0.0, since.expected_start - since.time), "Slurm's estimate at submission"
    if waits:
        return statistics.median(waits), "the median of its waits so far"
    return None, ""
