"""Disable garbage collection while large tables are parsed.

Their thousands of rows all stay: a collection among them finds nothing, and a full one in a process that holds
torch takes longer than the parsing.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def gc_disabled() -> Iterator[None]:
    """Disable automatic collection; it is on again afterwards if it was before."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()
