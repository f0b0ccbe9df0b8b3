"""Queues of what the supervisor delivers to slow receivers, each emptied by its own thread.

The supervisor must never wait for a web server, a user's script or slurmctld. An item is handed over in
no time and nothing that goes wrong with it comes back as an error. If items pile up, the oldest are dropped:
the newest describe the present state. Delivery is at most once: what waits when the process dies is lost.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Generic, TypeVar

from zslurm.checkpoint_tools.plain import reason_of

T = TypeVar("T")


class DeliveryQueue(Generic[T]):
    """Delivers items one after the other in a separate thread."""

    def __init__(
        self,
        name: str,
        deliver: Callable[[T], None],
        failed: Callable[[str], None],
        *,
        limit: int,
        give_up: Callable[[], None] = lambda: None,
    ) -> None:
        """Start no thread before the first item.

        Args:
            name: what it delivers to, the first word of each complaint.
            deliver: delivers one item; whatever it raises is a failure, the error's text the reason.
            failed: called with one line, from the queue's thread, of the first failure after a success.
            limit: how many items may wait.
            give_up: ends the delivery under way, when `close` has waited long enough.
        """
        self._name, self._deliver, self._failed, self._give_up = name, deliver, failed, give_up
        self._waiting: deque[T] = deque()
        self._limit = limit
        self._changed = threading.Condition()
        self._reporting = threading.Lock()
        self._thread: threading.Thread | None = None
        self._closing = self._busy = self._complained = False
        self._lost = 0

    def take(self, item: T) -> None:
        """Hand an item over. Never waits; after `close`, and if too many wait, an item is lost."""
        with self._changed:
            if self._closing:
                self._lost += 1
                return
            if len(self._waiting) == self._limit:
                self._waiting.popleft()
                self._lost += 1
            self._waiting.append(item)
            if self._thread is None:
                self._thread = threading.Thread(target=self._work, name=f"zslurm-{self._name}", daemon=True)
                self._thread.start()
            self._changed.notify_all()

    def flush(self, timeout_s: float) -> bool:
        """Wait until everything handed over was tried; False if that took longer than this."""
        deadline = time.monotonic() + timeout_s
        with self._changed:
            return self._changed.wait_for(
                lambda: not self._waiting and not self._busy, max(0.0, deadline - time.monotonic())
            )

    def close(self, timeout_s: float) -> int:
        """Deliver what waits, within a limit; report, and return, how many items were lost in all."""
        self.flush(timeout_s)
        with self._changed:
            self._closing = True
            self._lost += len(self._waiting) + self._busy
            self._waiting.clear()
            busy, lost = self._busy, self._lost
            self._changed.notify_all()
        if busy:
            self._give_up()
        with self._reporting:  # from here on the thread reports nothing: the events' file may be closed
            pass
        if lost:
            self._report(f"{lost} not delivered" if lost > 1 else "one was not delivered")
        return lost

    def _work(self) -> None:
        while True:
            with self._changed:
                self._busy = False
                self._changed.notify_all()
                self._changed.wait_for(lambda: self._waiting or self._closing)
                if not self._waiting:
                    return
                item = self._waiting.popleft()
                self._busy = True
            try:
                self._deliver(item)
                self._complained = False
            except Exception as error:  # a hook is other people's code: nothing of it may end the supervisor
                with self._reporting:
                    if not self._complained and not self._closing:
                        self._complained = True
                        self._report(reason_of(error))

    def _report(self, what: str) -> None:
        with contextlib.suppress(Exception):  # the disk may be full: nothing is left to do
            self._failed(f"{self._name}: {what}")
