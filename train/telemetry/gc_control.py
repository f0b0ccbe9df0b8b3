"""Python's garbage collector, made to stop all ranks at once instead of one after the other.

Left to itself it runs on each rank when that one has made enough objects, and everyone waits for it in the next
collective: with many ranks nearly every step has somebody who collects. Here it runs on no rank by itself, and on
all of them at the same step, every n steps. What was made before the first step (modules, the model, the
compiler's tables: hundreds of thousands of objects that live to the end) is frozen, so that a collection looks
only at what came since. In between, reference counts free nearly everything; what waits are cycles.

benchmarks/garbage.py measures a collection with and without the freeze.
"""

from __future__ import annotations

import gc
from types import TracebackType


class GarbageControl:
    """Collects every `every` steps, and only then, inside of its `with` block; 0 leaves the collector alone."""

    def __init__(self, every: int) -> None:
        self._every = every
        self._was_enabled = False

    def __enter__(self) -> GarbageControl:
        if self._every:
            self._was_enabled = gc.isenabled()
            gc.collect()
            gc.freeze()
            gc.disable()
        return self

    def after_step(self, step: int) -> None:
        """Collect if `step` is one of those; the same on all ranks."""
        if self._every and step % self._every == 0:
            gc.collect()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._every:
            gc.unfreeze()
            if self._was_enabled:
                gc.enable()
