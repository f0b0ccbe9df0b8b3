"""Follow runs: when to look for what is new, and until when."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence

from zslurm.run.run_dir import RunDir
from zslurm.run.state.run_state import look_all

POLL_S = 0.5
STATE_EVERY_S = 3.0
"""Slurm is asked whether the runs are active at most this often."""


def looks(runs: Sequence[RunDir], *, follow: bool) -> Iterator[bool]:
    """Yield whether any of the runs is active: once at the start, and when following again for every look.

    A caller that follows prints what is new at each look, and stops when nothing is and the runs rest.
    """
    active, asked = follow and _any_active(runs), time.monotonic()
    yield active
    while follow:
        yield active
        if time.monotonic() - asked > STATE_EVERY_S:
            active, asked = _any_active(runs), time.monotonic()
        time.sleep(POLL_S if active else 0)


def _any_active(runs: Sequence[RunDir]) -> bool:
    return any(state.active for state in look_all(list(runs), cached=True))
