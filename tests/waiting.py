"""Waiting for something to become true, with one generous deadline: nothing in a test asserts seconds."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")
DEADLINE_S = 180.0
"""Long enough for a machine on which much else runs; only a test that fails waits for it."""


def wait_for(
    condition: Callable[[], T | None], what: str, *, deadline_s: float = DEADLINE_S, every_s: float = 0.05
) -> T:
    """The first true value of `condition`, which is asked again and again with a pause of `every_s` seconds.

    Raises:
        TimeoutError: it stayed false; the message says what was waited for and the last value.
    """
    end = time.monotonic() + deadline_s
    while not (value := condition()):
        if time.monotonic() > end:
            raise TimeoutError(f"waited {deadline_s:.0f} s for {what}; last seen: {value!r}")
        time.sleep(every_s)
    return value


def with_limit_that_suffices(act: Callable[[float], T], got_so_far: Callable[[T], object]) -> T:
    """The result of what a limit of seconds cuts off in any case, with a limit in which it got as far as it can.

    A program that hangs after its first line, for example, is stopped at the limit; on a busy machine a short one
    ends before that line. Each further limit is three times longer.
    """
    limit_s = 1.0
    while not got_so_far(result := act(limit_s)) and limit_s < DEADLINE_S:
        limit_s *= 3
    return result
