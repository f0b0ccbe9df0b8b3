"""Whether the run was asked to stop, by whom, and whether its job is to come back."""

from __future__ import annotations

import signal

import pytest

from zslurm.aegis.job import StopRequest
from zslurm.slurm.preemption import Preemption

IN_GRACE = Preemption(1.0, "requeue", done=False, ends_at=31.0)
DONE = Preemption(1.0, "requeue", done=True)


@pytest.mark.parametrize(
    ("signum", "preemption", "asked", "comes_back"),
    [
        (None, None, False, False),
        (signal.SIGTERM, None, True, False),
        (signal.SIGINT, None, True, False),
        (signal.SIGUSR1, None, True, True),
        (signal.SIGUSR2, None, True, True),
        (None, IN_GRACE, True, True),
        (signal.SIGUSR2, IN_GRACE, True, True),
        (signal.SIGTERM, IN_GRACE, True, False),
        (signal.SIGTERM, DONE, True, False),
        (None, DONE, True, False),
    ],
)
def test_who_asks_and_what_becomes_of_the_job(
    signum: int | None, preemption: Preemption | None, asked: bool, comes_back: bool
) -> None:
    stop = StopRequest(signum, preemption=preemption)
    assert (stop.asked, stop.comes_back) == (asked, comes_back)
    assert stop.requeued is (preemption is DONE)
