"""Recovery in memory of one attempt, the shell's part: its store server, its warm processes and checks of spares.

The core decides (core/memory.py). It gets what they report as events, and its actions are carried out here.

A supervisor may take the attempt over from another one, which is gone. The store server has outlived that one and
knows the generations; the run directory has the steps of the warm processes, and the events what was recorded.
If the server does not answer, the reason is returned, and faults of the attempt restart the ranks.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any

from zslurm.aegis.core.adopted_memory import found_memory
from zslurm.aegis.core.attempt import MemoryState
from zslurm.aegis.core.messages import (
    CheckSpare,
    CoreAction,
    CoreEvent,
    FewerWeighed,
    HoldForMove,
    MemoryResumed,
    Regroup,
    SparesChecked,
    StartWarm,
    StoreGone,
    StoreReported,
    WarmEnded,
    WarmNotStarted,
    WeighFewer,
)
from zslurm.aegis.core.policy.shrinking import FewerNodes
from zslurm.aegis.logs.signatures import Signatures
from zslurm.aegis.supervisor.in_memory.warm_pool import WarmPool
from zslurm.aegis.supervisor.job import Job
from zslurm.core.errors import Exit, ZslurmError
from zslurm.core.files import read_json
from zslurm.job.in_memory.store_client import StoreClient
from zslurm.run.events.event import Event
from zslurm.run.metrics.tail import newest_rows
from zslurm.run.run_dir import AttemptDir
from zslurm.train.recovery.generation import member_name

_ANSWERS_S = 10.0
"""Seconds that the server gets: it may have been started a moment ago, and import torch."""
_AGAIN_S = 0.1

WeighNodes = Callable[[int, int], FewerNodes]
"""Returns why ranks on a number of nodes (the second) must not continue on fewer (the first)."""


class MemoryShell:
    """Recovery in memory of one attempt.

    Attributes:
        store: its store server.
        state: from which the core begins.
        rank_nodes: the node of each rank, then.
        resumed: what an earlier supervisor has left; None if the attempt begins.
        check: returns the spares that are unfit, with the reason; None: there are no agents that could tell.
    """

    def __init__(
        self,
        attempt: AttemptDir,
        store: StoreClient,
        warm: WarmPool,
        state: MemoryState,
        rank_nodes: Sequence[str],
        why_not_fewer: WeighNodes,
    ) -> None:
        """Prepare; for `why_not_fewer` see `WeighNodes`."""
        self.store, self.state, self.rank_nodes = store, state, list(rank_nodes)
        self.resumed: MemoryResumed | None = None
        self.check: Callable[[Collection[str]], Mapping[str, str]] | None = None
        self._attempt, self._warm, self._why_not_fewer = attempt, warm, why_not_fewer
        self._known: list[Mapping[str, Any]] = []  # what the server has reported before it was asked
        self._checked: queue.SimpleQueue[SparesChecked] = queue.SimpleQueue()

    @classmethod
    def adopt(
        cls,
        job: Job,
        attempt: AttemptDir,
        nodes: Sequence[str],
        events: Sequence[Event],
        warm: WarmPool,
        usable: Sequence[str],
        why_not_fewer: WeighNodes,
    ) -> MemoryShell:
        """Return the recovery of an attempt, as another supervisor has left it.

        Args:
            job: the start of the job.
            attempt: the attempt.
            nodes: on which it was started, in the order of its ranks.
            events: of the run so far.
            warm: for its warm processes; empty.
            usable: nodes of the job that may be used.
            why_not_fewer: see `WeighNodes`.

        Raises:
            ZslurmError: its store server cannot be reached.
        """
        store, report = _connect(attempt)
        per_node = job.spec.ranks_per_node
        first = [member_name(node, slot) for node in nodes for slot in range(per_node)]
        adopted = found_memory(
            report, first, [event for event in events if event.row.get("attempt") == attempt.number]
        )
        newest = newest_rows(job.run.metrics).step
        trained = int(newest["step"]) if newest.get("attempt") == attempt.number else -1
        state = adopted.state(per_node, usable, warm.adopt(), report["warm"], trained)
        memory = cls(attempt, store, warm, state, adopted.rank_nodes, why_not_fewer)
        memory.resumed = MemoryResumed(adopted.pending, adopted.died, time.monotonic())
        memory._known += [adopted.outcome] if adopted.outcome is not None else []
        return memory

    def events(self, members: Sequence[str]) -> Iterable[CoreEvent]:
        """Yield what is new; `members` are the processes of the ranks.

        What the server reports comes first: a process that ends after a recovery is not one that it has replaced.
        """
        earlier, self._known = self._known, []
        for report in (*earlier, *self.store.poll()):
            yield StoreReported(report, time.monotonic(), time.time())
        for member, failure in self._warm.ended():
            ends = {}
            if failure.exit_code == Exit.INTERRUPTED and member in members:
                rank = members.index(member)
                ends = {rank: end} if (end := read_json(self._attempt.rank_end(rank))) else {}
            yield WarmEnded(member, failure, ends, time.monotonic())
        while not self._checked.empty():
            yield self._checked.get()

    def carry_out(self, action: CoreAction) -> Iterable[CoreEvent]:
        """Do what the core asks for; yield what came of it."""
        match action:
            case StartWarm():
                Signatures.load()  # read once: not when a rank is lost
                if problem := self._warm.start(action.nodes, action.per_node):
                    yield WarmNotStarted(action, problem)
            case WeighFewer():
                verdict = self._why_not_fewer(action.nodes, action.in_use)
                yield FewerWeighed(action.nodes, verdict.reason, verdict.weighed)
            case CheckSpare():
                work = threading.Thread(target=self._check, args=(action,), name="spares", daemon=True)
                work.start()
            case Regroup():
                if not self.store.generation(action.generation):
                    yield StoreGone(move=False)
            case HoldForMove():
                if not self.store.move(action.generation):
                    yield StoreGone(move=True)

    def _check(self, action: CheckSpare) -> None:
        unfit = self.check(action.nodes) if self.check is not None else {}
        self._checked.put(SparesChecked({node: unfit.get(node, "") for node in action.nodes}, action.round))

    def holds_ranks(self, members: Sequence[str]) -> bool:
        """Return whether ranks, which are these processes, may be in the steps of warm processes."""
        return any("/w" in member for member in members) and self._warm.runs

    def close(self) -> None:
        """End the warm processes and the store; the ranks are gone."""
        self._warm.end()
        self.store.stop()


def _connect(attempt: AttemptDir) -> tuple[StoreClient, Mapping[str, Any]]:
    """Return a connection to the store server, and what it knows.

    Raises:
        ZslurmError: it does not answer.
    """
    deadline = time.monotonic() + _ANSWERS_S
    while True:
        try:
            store = StoreClient.adopt(attempt)
            break
        except FileNotFoundError as error:  # it may have been started just now
            if time.monotonic() > deadline or attempt.step_exit.exists():
                raise ZslurmError(str(error.strerror)) from error
        except OSError as error:
            raise ZslurmError(f"its store server does not answer: {error.strerror or error}") from error
        time.sleep(_AGAIN_S)
    report = store.taken_over(_ANSWERS_S)
    if report is None:
        raise ZslurmError(f"its store server did not answer within {_ANSWERS_S:g} s")
    return store, report
