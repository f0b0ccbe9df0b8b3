"""Waiting for something to become true, with one generous deadline: nothing in a test asserts seconds."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")
DEADLINE_S = 90.0


def wait_for(condition: Callable[[], T | None], what: str, *, deadline_s: float = DEADLINE_S) -> T:
    """The first true value of `condition`.

    Raises:
        TimeoutError: it stayed false; the message says what was waited for and the last value.
    """
    end = time.monotonic() + deadline_s
    while not (value := condition()):
        if time.monotonic() > end:
            raise TimeoutError(f"waited {deadline_s:.0f} s for {what}; last seen: {value!r}")
        time.sleep(0.05)
    return value
