"""When a run waits in the queue for longer than expected."""

from __future__ import annotations

from typing import Any

import pytest

from zslurm.run.events.event import Event, from_row
from zslurm.run.queue_wait import why_overdue

HOUR = 3600.0
BEGAN = 1_800_000_000.0


def submitted(at: float = 0.0, **fields: Any) -> Event:
    return from_row({"time": BEGAN + at, "action": "submit", "job_id": "7", **fields})


def event(kind: str, at: float, **fields: Any) -> Event:
    return from_row({"time": BEGAN + at, "event": kind, "job_id": "7", "attempt": 1, **fields})


PROMISED = submitted(expected_start=BEGAN + HOUR)
WAITED_ONCE = [
    submitted(),
    event("attempt_started", HOUR, nodes="n0", world_size=8),
    event("requeued", 3 * HOUR, excluded="n1", reason="it died"),
]


@pytest.mark.parametrize(
    ("events", "now", "set_s", "why"),
    [
        ([PROMISED], 1.9 * HOUR, None, ""),
        ([PROMISED], 2.1 * HOUR, None, "expected were 1h 00m"),
        ([submitted(expected_start=BEGAN)], 599.0, None, ""),
        ([submitted(expected_start=BEGAN)], 601.0, None, "Slurm's estimate at submission"),
        ([submitted()], 100 * HOUR, None, ""),
        ([submitted()], 3 * HOUR, HOUR, "aegis.expected_wait_s"),
        (WAITED_ONCE, 4.9 * HOUR, None, ""),
        (WAITED_ONCE, 5.1 * HOUR, None, "the median of its waits so far"),
        (WAITED_ONCE[:2], 99 * HOUR, None, ""),
    ],
)
def test_a_wait_is_too_long_after_twice_what_was_expected(
    events: list[Event], now: float, set_s: float | None, why: str
) -> None:
    found = why_overdue(events, BEGAN + now, set_s=set_s)
    assert (why in found) if why else found == ""


def test_each_wait_is_reported_once() -> None:
    told = [PROMISED, from_row({"time": BEGAN + 2.5 * HOUR, "action": "queue_overdue", "job_id": "7"})]
    assert why_overdue(told, BEGAN + 9 * HOUR) == ""
    again = [*told, event("attempt_started", 10 * HOUR), event("requeued", 11 * HOUR)]
    assert "expected were 10h 00m" in why_overdue(again, BEGAN + 40 * HOUR)
