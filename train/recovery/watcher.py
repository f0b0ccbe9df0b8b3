"""The thread that learns of new generations, over its own connection to the store.

It polls: a TCPStore's blocking wait cannot be interrupted, and torch logs each of its timeouts. The pause grows
with the number of ranks, so that the store answers some ten thousand questions a second at most.

A process that finds itself outside of the newest generation was replaced while it could not answer (it was frozen,
or cut off), and exits at once, from this thread. Its other threads may run before this one does: `fence` is what
they call before they touch a checkpoint or the metrics. It costs nothing unless this thread has not looked for
LEASE_S: then it asks the store first. So a supervisor must not replace a process that is alive earlier than that
after its last sign of life. If the store is gone by then, no answer can come, and the process exits as well: its
attempt may be over. One that finds the store gone at once trains on: without a store no process is replaced.
"""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Callable

import torch.distributed as dist

from zslurm.train.recovery.generation import Generation, generation_key, move_key

LEASE_S = 1.0
REPLACED = 1
"""Exit code of a process whose place another one has taken."""

POLL_S = 0.01
POLL_PER_RANK_S = 0.0001
_MOVES_S = 0.25
"""Seconds between two questions whether a move is planned: it waits for a step's boundary anyway."""
_LEAVES_S = 10.0
"""Seconds that a process whose rank has moved elsewhere as planned gets to end in order."""


class GenerationWatcher:
    """Keeps the newest generation.

    Attributes:
        newest: the newest generation that this process knows of; None before the first after the start.
        planned: number of the generation that is to follow at a step's boundary; 0 if none is.
    """

    def __init__(
        self,
        store: dist.Store,
        member: str,
        ranks: int,
        on_generation: Callable[[Generation], None],
        newest: Generation | None = None,
    ) -> None:
        """Watch for `member`, over a connection that nothing else uses; `on_generation` is called in the thread.

        `newest` is known already.
        """
        self.newest = newest
        self.planned, self._asked_for_moves = 0, 0.0
        self._store, self._member, self._on_generation = store, member, on_generation
        self._pause = max(POLL_S, ranks * POLL_PER_RANK_S)
        self._looked = time.monotonic()
        self._lock = threading.Lock()
        self._changed = threading.Condition()
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run, name="generations", daemon=True)
        self._thread.start()

    @property
    def number(self) -> int:
        """Number of the newest generation."""
        return self.newest.number if self.newest is not None else 0

    def wait_after(self, number: int, timeout_s: float) -> Generation | None:
        """Return a generation after `number`, once there is one; None if there is none in time."""
        with self._changed:
            self._changed.wait_for(lambda: self.number > number or self._over.is_set(), timeout_s)
        return self.newest if self.number > number else None

    def fence(self) -> None:
        """Return only in a member of the newest generation; see above."""
        if time.monotonic() - self._looked > LEASE_S and not self._over.is_set():
            try:
                self._look()
            except RuntimeError:
                self._store_gone()

    def close(self) -> None:
        """End the thread."""
        self._over.set()
        with self._changed:
            self._changed.notify_all()
        self._thread.join(LEASE_S)

    def _run(self) -> None:
        while not self._over.wait(self._pause):
            try:
                self._look()
                self._look_for_move()
            except RuntimeError as error:  # DistStoreError, DistNetworkError
                if not self._over.is_set():
                    self._store_gone()
                    line = str(error).partition("\n")[0]
                    print(f"recovery: the store is out of reach: {line}", file=sys.stderr, flush=True)
                break
        self._over.set()
        with self._changed:
            self._changed.notify_all()

    def _store_gone(self) -> None:
        """Return only if this process was a member as long as there was a store."""
        blind_s = time.monotonic() - self._looked
        if blind_s > LEASE_S:
            why = f"the store is gone, and this process has not looked at it for {blind_s:.0f} s"
            _leave(f"{self._member} may have been replaced: {why}")

    def _look_for_move(self) -> None:
        now, number = time.monotonic(), self.number + 1
        if self.planned != number and now - self._asked_for_moves >= _MOVES_S:
            self._asked_for_moves = now
            self.planned = number if self._store.check([move_key(number)]) else 0

    def _look(self) -> None:
        with self._lock:
            # Before the question: its answer is as old as this where the process is frozen before it looks at it.
            asked = time.monotonic()
            number, newest = self.number, None
            while self._store.check([generation_key(number + 1)]):
                number += 1
                newest = number
            self._looked = asked
            if newest is None:
                return
            generation = Generation.of_json(self._store.get(generation_key(newest)))
            leaves = generation.leaves(self._member)
            if generation.rank_of(self._member) is None and not leaves:
                number = generation.number
                _leave(f"{self._member} is no member of generation {number}: another process has taken its place")
            with self._changed:
                self.newest = generation
                self._changed.notify_all()
            if leaves:  # with the lock: `fence` returns in no process that is not a member any more
                time.sleep(_LEAVES_S)
                os._exit(0)
        self._on_generation(generation)


def _leave(why: str) -> None:
    os.write(2, f"error: {why}\n".encode())
    os._exit(REPLACED)
