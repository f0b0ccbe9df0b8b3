"""Planned moves of one attempt: nodes that its ranks should leave, asked for by people, or by the policy.

    `zslurm move` -> submissions.jsonl
    Slurm drains a node -> a fault
    advisory faults -> policy/planned_moves.py      all of them -> one node after the other -> memory_recovery.py

Only a spare on which warm processes wait takes a node's place, so a node waits for its move until there are some.
A request of a person is always answered, by the event `ranks_moved` or `move_refused`. What a fault interrupts is
tried again. A node that was left is excluded like one that failed: no later attempt of this run uses it.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Collection, Sequence
from contextlib import suppress
from dataclasses import dataclass, field

from zslurm.aegis.core.policy.planned_moves import KINDS, nodes_to_leave
from zslurm.aegis.fault_kinds import NODE_DRAINED
from zslurm.aegis.supervisor.in_memory.memory_recovery import MemoryRecovery
from zslurm.aegis.supervisor.job import Job
from zslurm.aegis.types import Fault
from zslurm.core.errors import ZslurmError
from zslurm.run.events import MoveAsked, MoveRefused, RanksMoved
from zslurm.run.events.event import from_row, select
from zslurm.run.events.event_text import node_names
from zslurm.slurm.client import SlurmClient
from zslurm.slurm.commands import Retries
from zslurm.slurm.hostlist import compress
from zslurm.slurm.inventory import Node
from zslurm.train.jsonl import JsonLinesTail, read_jsonl

_LOOK_S = 0.5
"""Seconds between two looks for requests."""
_DRAINS_S = 30.0
"""Seconds between two questions to Slurm which nodes are drained."""
_SPARE_READY_S = 600.0
"""Seconds that a request waits for a spare whose processes are not ready yet."""
_MOST_TRIES = 3
_ANSWER_S = 10.0


@dataclass
class _Wish:
    """A node to leave.

    Attributes:
        node: its name.
        reason: why.
        request: of a person; None where the policy wants it.
        since: when it was noted (monotonic seconds).
        tries: moves that were begun for it.
    """

    node: str
    reason: str
    request: str | None = None
    since: float = field(default_factory=time.monotonic)
    tries: int = 0


class PlannedMoves:
    """The planned moves of one attempt."""

    def __init__(
        self,
        job: Job,
        attempt: int,
        memory: MemoryRecovery | None,
        drained: Callable[[], list[Node]] | None = None,
    ) -> None:
        """Plan none yet; `drained` asks Slurm for the nodes that it drains.

        What was asked before, and answered, is not done again.
        """
        self._job, self._attempt, self._memory = job, attempt, memory
        self._requests = JsonLinesTail(job.run.submissions)
        events = list(read_jsonl(job.run.events))
        made, refused = select(events, RanksMoved), select(events, MoveRefused)
        self._answered = {(e.request, e.off) for e in made} | {(e.request, e.off) for e in refused}
        self._wishes: list[_Wish] = []
        self._signs: list[Fault] = []
        self._known: set[tuple[str, str]] = set()  # what was refused to the policy: not again
        self._look_at = 0.0
        self._drains = _Drains(drained or self._ask_slurm) if memory is not None and job.on_slurm else None

    def close(self) -> None:
        """Ask Slurm no more."""
        if self._drains is not None:
            self._drains.close()

    def tend(self, faults: Sequence[Fault]) -> list[Fault]:
        """Note what nodes to leave, and begin the next move; returns faults that were noticed in doing so."""
        drained = self._drains.changes(self._nodes) if self._drains is not None else []
        if self._job.spec.aegis.planned_moves and self._memory is not None:
            self._take_faults([*faults, *drained])
        if time.monotonic() < self._look_at:
            return drained
        self._look_at = time.monotonic() + _LOOK_S
        self._take_requests()
        if self._wishes and not self._job.stop.asked:
            self._next(faults)
        return drained

    @property
    def nodes(self) -> set[str]:
        """The nodes that the ranks are about to leave, so that the attempt need not be ended for a slow one."""
        return {wish.node for wish in self._wishes}

    @property
    def _nodes(self) -> set[str]:
        return set(self._memory.places.nodes) if self._memory is not None else set()

    def _take_requests(self) -> None:
        rows = []
        with suppress(OSError):  # the file system is away
            rows = self._requests.new_records()
        for row in rows:
            event = from_row(row)
            if not isinstance(event, MoveAsked) or event.job_id != self._job.job_id:
                continue
            by = f" by {event.user}" if event.user else ""
            for node in node_names(event.off):
                if (event.request, node) not in self._answered:
                    self._wishes.append(_Wish(node, f"asked for{by}", event.request))

    def _take_faults(self, faults: Sequence[Fault]) -> None:
        """Note what the policy wants to leave; signs are kept, for faults that the run overcame are forgotten."""
        self._signs += [fault for fault in faults if fault.kind in KINDS and fault not in self._signs]
        for leave in nodes_to_leave(self._signs, self._nodes):
            known = (leave.node, leave.reason)
            if known not in self._known and all(wish.node != leave.node for wish in self._wishes):
                self._known.add(known)
                self._wishes.append(_Wish(*known))

    def _next(self, faults: Sequence[Fault]) -> None:
        """Continue with the first wish: begin its move, wait for it, or refuse it."""
        wish, memory = self._wishes[0], self._memory
        if memory is None:
            self._refuse(wish, "this attempt has no recovery in memory: see the event recovery_unavailable")
            return
        if wish.node in memory.places.left:
            self._wishes.remove(wish)
            self._exclude(wish)
            return
        if memory.given_up:
            self._refuse(wish, "recovery in memory is not possible in this attempt any more: see its events")
            return
        if memory.active or memory.moves.move is not None:
            return
        if memory.moves.in_vain:
            self._refuse(wish, "the ranks held for a move, and a copy of their state was not whole in time")
            return
        if wish.node not in memory.places.nodes:
            self._refuse(wish, f"no rank is on {wish.node} (ranks are on {compress(self._nodes)})")
            return
        if wish.tries >= _MOST_TRIES:
            self._refuse(wish, f"faults interrupted it {wish.tries} times")
            return
        unfit = {fault.node for fault in faults if fault.role == "root" and not fault.cleared and fault.node}
        unfit |= memory.unfit | (self._drains.nodes if self._drains is not None else set())
        plan = memory.plan_move(wish.node, unfit)
        if plan.possible:
            if not memory.has_fit_spares(plan):  # it is checked, or another one is looked for
                return
            wish.tries += 1
            if not memory.begin_move(wish.node, plan, wish.reason, wish.request):
                self._refuse(wish, "the store server is gone")
        elif not self._may_come(unfit) or time.monotonic() > wish.since + _SPARE_READY_S:
            self._refuse(wish, plan.reason)

    def _may_come(self, unfit: Collection[str]) -> bool:
        """Return whether a spare is there, whose processes may get ready."""
        assert self._memory is not None
        places = self._memory.places
        there = set(places.spares) - set(places.nodes) - places.left - places.dead
        return bool(there.difference(unfit))

    def _refuse(self, wish: _Wish, reason: str) -> None:
        self._wishes.remove(wish)
        self._job.record(MoveRefused(attempt=self._attempt, off=wish.node, reason=reason, request=wish.request))

    def _exclude(self, wish: _Wish) -> None:
        self._job.exclude([wish.node], f"the ranks moved off it: {wish.reason}", self._attempt)

    def _ask_slurm(self) -> list[Node]:
        client = SlurmClient(self._job.environ, timeout_s=_ANSWER_S, retries=Retries(attempts=1))
        return client.nodes()


class _Drains:
    """Knows which nodes Slurm drains: a thread asks now and then, for an answer may take long.

    Attributes:
        nodes: those that are drained, as of the last answer.
    """

    def __init__(self, ask: Callable[[], list[Node]]) -> None:
        self._ask = ask
        self._newest: dict[str, str] | None = None
        self.nodes: set[str] = set()
        self._over = threading.Event()
        threading.Thread(target=self._run, name="drains", daemon=True).start()

    def close(self) -> None:
        self._over.set()

    def _run(self) -> None:
        while not self._over.is_set():
            with suppress(ZslurmError, OSError):  # Slurm is away: it is asked again
                self._newest = {node.name: node.reason for node in self._ask() if "drain" in node.flags}
            self._over.wait(_DRAINS_S)

    def changes(self, among: Collection[str]) -> list[Fault]:
        """Return faults for nodes that are drained since the last call, and for those that are no more."""
        newest = self._newest
        if newest is None:
            return []
        now, found = time.time(), []
        for node in sorted(among):
            if (node in newest) != (node in self.nodes):
                why = f": {newest[node]}" if newest.get(node) else ""
                line = f"Slurm drains {node}{why}" if node in newest else f"Slurm drains {node} no more"
                found.append(
                    Fault.of_kind(NODE_DRAINED, now, "slurm", line, node=node, cleared=node not in newest)
                )
        self.nodes = set(newest)
        return found
