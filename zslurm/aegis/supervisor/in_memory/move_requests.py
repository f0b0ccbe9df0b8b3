"""What asks ranks of an attempt to leave nodes: people, by `zslurm requeue --off`, and Slurm, which drains nodes.

The core decides what becomes of that (core/moves.py).
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable
from contextlib import suppress

from zslurm.aegis.core.messages import DrainsRead, MoveRequested
from zslurm.aegis.supervisor.job import Job
from zslurm.core.errors import ZslurmError
from zslurm.run.events import MoveAsked, MoveRefused, RanksMoved
from zslurm.run.events.event import from_row, select
from zslurm.run.events.event_text import node_names
from zslurm.slurm.client import SlurmClient
from zslurm.slurm.inventory import Node
from zslurm.slurm.run_command import Retries
from zslurm.train.jsonl import JsonLinesTail, read_jsonl

_LOOK_S = 0.5
"""Seconds between two looks for requests."""
_DRAINS_S = 30.0
"""Seconds between two questions to Slurm which nodes are drained."""
_ANSWER_S = 10.0


class MoveRequests:
    """What asks the ranks of an attempt to leave nodes."""

    def __init__(self, job: Job, *, ask_drains: bool, drained: Callable[[], list[Node]] | None = None) -> None:
        """Begin to ask Slurm which nodes it drains if `ask_drains` is set, by `drained` if that is given."""
        self._job = job
        self._requests = JsonLinesTail(job.run.submissions)
        self._look_at = 0.0
        self._over = threading.Event()
        self._newest: DrainsRead | None = None
        if ask_drains:
            args = (drained or self._ask_slurm,)
            threading.Thread(target=self._ask_again, args=args, name="drains", daemon=True).start()

    def answered(self) -> frozenset[tuple[str | None, str]]:
        """Return the requests, and nodes of them, that have been answered, also by other supervisors."""
        events = list(read_jsonl(self._job.run.events))
        moved = {(event.request, event.off) for event in select(events, RanksMoved)}
        return frozenset(moved.union((event.request, event.off) for event in select(events, MoveRefused)))

    def events(self) -> Iterable[DrainsRead | MoveRequested]:
        """Yield what is new."""
        newest, self._newest = self._newest, None
        if newest is not None:
            yield newest
        if time.monotonic() < self._look_at:
            return
        self._look_at = time.monotonic() + _LOOK_S
        rows = []
        with suppress(OSError):  # the file system is away
            rows = self._requests.new_records()
        for row in rows:
            event = from_row(row)
            if isinstance(event, MoveAsked) and event.job_id == self._job.job_id:
                by = f" by {event.user}" if event.user else ""
                for node in node_names(event.off):
                    yield MoveRequested(node, f"asked for{by}", event.request, time.monotonic())

    def close(self) -> None:
        """Ask Slurm no more."""
        self._over.set()

    def _ask_again(self, ask: Callable[[], list[Node]]) -> None:
        """Ask Slurm now and then which nodes it drains: an answer may take long."""
        while not self._over.is_set():
            with suppress(ZslurmError, OSError):  # Slurm is away: it is asked again
                drained = {node.name: node.reason for node in ask() if node.is_draining}
                self._newest = DrainsRead(drained, time.time())
            self._over.wait(_DRAINS_S)

    def _ask_slurm(self) -> list[Node]:
        client = SlurmClient(self._job.environ, timeout_s=_ANSWER_S, retries=Retries(attempts=1))
        return client.nodes()
