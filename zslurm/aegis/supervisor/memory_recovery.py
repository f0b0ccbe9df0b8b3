"""Recovery in memory, the supervisor's part: who was lost, who takes their place, and whether that worked.

    lost ranks -> policy/in_memory.py -> next generation to the store server -> recovered, or failed -> next rung

    a node to leave -> plan_move -> the same generation at a step's boundary -> moved       (planned_moves.py)

The ranks do the rest (zslurm/train/recovery). While they regroup the attempt is not given up. What fails, or takes
longer than aegis.recovery_s, leaves the attempt as it would have been without: it is ended, and started again.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from zslurm.aegis.logs.signatures import Signatures
from zslurm.aegis.policy.in_memory import (
    InMemory,
    Ranks,
    plan_in_memory,
    plan_move,
    why_not_in_memory,
)
from zslurm.aegis.supervisor.job import Job
from zslurm.aegis.supervisor.warm_pool import WarmPool
from zslurm.aegis.types import Fault
from zslurm.job.store_client import StoreClient
from zslurm.run.run_dir import AttemptDir
from zslurm.slurm.srun_output import TaskFailure
from zslurm.slurm.topology import hostlist_in_order
from zslurm.train.recovery.generation import Generation, member_name, node_of

_ANSWER_S = 1.0
"""Seconds beyond the deadline that the store server gets to report that it has passed."""


@dataclass(frozen=True)
class Move:
    """A planned move.

    Attributes:
        off: the node that ranks leave.
        plan: who continues as them.
        ranks: which they are.
        number: of the generation in which they do.
        reason: why.
        request: the request that it answers, where a person asked.
    """

    off: str
    plan: InMemory
    ranks: tuple[int, ...]
    number: int
    reason: str
    request: str | None = None


@dataclass(frozen=True)
class Resumed:
    """What an earlier supervisor of an attempt has left (adoption.py).

    Attributes:
        members: by rank, before `pending`.
        number: of the newest generation.
        step: to which the last recovery went back; -1 where there was none.
        trained: the last step that is known to be finished; -1 where none is.
        dead, left, ended: as of MemoryRecovery.
        died: nodes that have died in this attempt.
        given_up: nothing is recovered in memory in this attempt any more.
        pending: the newest generation where nobody has recorded yet how it ended.
        outcome: of `pending`, where the store server knows it.
        move: the planned move that `pending` is, or that waits for a boundary.
        unmovable: the ranks have held in vain for the next generation.
    """

    members: tuple[str, ...]
    number: int = 0
    step: int = -1
    trained: int = -1
    dead: frozenset[str] = frozenset()
    left: frozenset[str] = frozenset()
    ended: frozenset[int] = frozenset()
    died: frozenset[str] = frozenset()
    given_up: bool = False
    pending: Generation | None = None
    outcome: Mapping[str, Any] | None = None
    move: Move | None = None
    unmovable: bool = False


@dataclass
class MemoryRecovery:
    """The generations of one attempt.

    Attributes:
        job: the start of the job.
        attempt: the attempt.
        store: its store server.
        warm: its warm processes.
        nodes: the node of each rank now.
        spares: nodes without ranks that may be used.
        dead: nodes that died, and whose ranks are elsewhere now.
        left: nodes that ranks have left as planned.
        ended: ranks that hung, and were killed alone, since the last recovery.
        move: the planned move for which a boundary is waited for, or that is being made; None where there is none.
    """

    job: Job
    attempt: AttemptDir
    store: StoreClient
    warm: WarmPool
    nodes: list[str]
    spares: tuple[str, ...] = ()
    dead: set[str] = field(default_factory=set)
    left: set[str] = field(default_factory=set)
    ended: set[int] = field(default_factory=set)
    move: Move | None = None
    number: int = 0
    """Number of the newest generation."""
    why_not_fewer: Callable[[int], str] = lambda nodes: "aegis.min_nodes is not set"
    """Returns why the ranks must not continue on so many nodes; empty where they may."""
    unmovable: bool = False
    """Whether the ranks have held for a move in vain: before the next generation they do not do so again."""
    resized: bool = False
    """Whether the last recovery that was taken has left out ranks."""

    def __post_init__(self) -> None:
        """Name the members of the first generation."""
        per_node = self.job.spec.ranks_per_node
        self.members = [member_name(node, rank % per_node) for rank, node in enumerate(self.nodes)]
        self._lost: set[int] = set()
        self._lost_nodes: set[str] = set()
        self._asked_at: float | None = None
        self._deadline: float | None = None
        self._planned = InMemory()
        self._given_up = self._again = self._ready = False
        self._awaits_warm = False  # too few processes are ready, and more are being started
        self._recovered_at_step, self._tries = -1, 0
        self._trained = -1  # the step that an earlier supervisor has seen finished
        self._new: tuple[set[int], set[str]] = (set(), set())
        self._overtaken: Move | None = None  # by a fault, before the ranks came to its boundary, perhaps

    # --- what the monitor asks ----------------------------------------------------------------------------------

    @property
    def active(self) -> bool:
        """Whether the ranks regroup now, so that nothing else must be done about them."""
        return self._deadline is not None

    @property
    def holds_ranks(self) -> bool:
        """Whether ranks may be in the steps of warm processes."""
        return any("/w" in member for member in self.members) and self.warm.runs

    def tend(self, step: int) -> None:
        """Take what the server reports, and have warm processes ready once the ranks train."""
        for event in self.store.poll():
            self._take(event)
        if self._deadline is not None and time.monotonic() > self._deadline:
            what = "no process was ready to take a place" if self._awaits_warm else "the ranks did not regroup"
            self._give_up(f"{what} within {self.job.spec.aegis.recovery_s:g} s (aegis.recovery_s)")
        if step >= 0 and not self.warm.started:
            self._start_warm()

    def _take(self, event: Mapping[str, Any]) -> None:
        kind, number = event.get("event"), event.get("number")
        if kind == "warm":
            self.warm.add(str(event.get("member")))
            self._again |= self._awaits_warm
            self._announce()
        elif kind == "recovered" and number == self.number and self.active:
            self._recovered(int(event.get("step", -1)), int(event.get("rolled_back", 0)))
        elif kind == "boundary":
            self._begin_move(int(event.get("number", 0)))
        elif kind == "unmoved" and self.move is not None and number == self.move.number:
            self.move, self.unmovable = None, True
        elif kind == "refused" and self._overtaken is not None and number == self._overtaken.number:
            pass  # a fault's generation came too late: that of a move was there; the next one has both
        elif kind in ("failed", "refused") and event.get("number", self.number) == self.number and self.active:
            self._give_up(str(event.get("reason", "the ranks gave no reason")))

    def resume(self, found: Resumed) -> None:
        """Continue where an earlier supervisor of this attempt has left off."""
        self.members, self.nodes = list(found.members), [node_of(member) for member in found.members]
        self.dead, self.left, self.ended = set(found.dead), set(found.left), set(found.ended)
        self.number, self.move, self.unmovable = found.number, found.move, found.unmovable
        self._given_up, self._recovered_at_step, self._trained = found.given_up, found.step, found.trained
        self._tries = 1 if found.step >= 0 else 0
        generation = found.pending
        if found.given_up:
            return
        self._announce()
        if generation is None:
            return
        nodes = tuple(node_of(member) for member in generation.members)
        self._planned = InMemory(generation.members, nodes, generation.former)
        left_out = set(range(generation.former_size)).difference(generation.former)
        self._lost = left_out or set(generation.lost)
        self._lost_nodes = {self.nodes[rank] for rank in self._lost} & set(found.died)
        self._asked_at = time.monotonic()
        self._deadline = self._asked_at + self.job.spec.aegis.recovery_s + _ANSWER_S
        if found.outcome is not None:
            self._take(found.outcome)

    def lost_members(self) -> list[tuple[int, TaskFailure]]:
        """Return ranks whose process was a warm one and has failed since the last call, and how."""
        ended = self.warm.ended()
        self._again |= self._awaits_warm and bool(ended)
        self._again |= any(member in self._planned.members and member not in self.members for member, _ in ended)
        return [(self.members.index(member), failure) for member, failure in ended if member in self.members]

    def consider(self, lost: Collection[int], dead: Collection[str], faults: Sequence[Fault], step: int) -> bool:
        """Begin a recovery where ranks were lost that no recovery has taken up yet.

        Args:
            lost: ranks whose present process is gone.
            dead: nodes that are dead.
            faults: what was noticed since the last recovery.
            step: the last step that is finished.

        Returns:
            Whether the ranks regroup now; false: do what would be done without a recovery in memory.
        """
        if self._given_up:
            return False
        step = max(step, self._trained)
        on_dead = {rank for rank, node in enumerate(self.nodes) if node in dead}
        gone = set(lost) | on_dead
        if not (gone - self._lost or (self._again and self.active)):
            return self.active
        self._again = False
        self._lost |= gone
        self._lost_nodes |= {self.nodes[rank] for rank in on_dead}
        if step > self._recovered_at_step:
            self._tries = 0
        ranks = Ranks(
            tuple(self.members), tuple(self.nodes), self.job.spec.ranks_per_node, frozenset(self._lost),
            frozenset(self._lost_nodes | self.dead | self._leaving), self.warm.waiting, self.warm.coming, step,
            self._tries, ended=frozenset(self.ended), planned=self._regrouping,
        )  # fmt: skip
        plan = plan_in_memory(
            ranks, faults, most_tries=max(1, self.job.spec.aegis.retries), why_not_fewer=self.why_not_fewer
        )
        if plan.waits:
            self._start_more(plan)
        elif plan.possible:
            self._publish(plan)
        else:
            self._give_up(plan.reason)
        return self.active

    @property
    def _regrouping(self) -> tuple[str, ...]:
        """The members of the generation that is under way; none where it has another number of ranks."""
        return self._planned.members if self.active and not self._planned.former else ()

    def leave(self, fault: Fault) -> None:
        """Record why a fault is not recovered from in memory that ends the attempt with no rank lost yet."""
        if not self._given_up:
            self._give_up(why_not_in_memory(fault))

    def why_not(self, lost: Collection[int], faults: Sequence[Fault], step: int) -> str:
        """Return why ranks could not be replaced if they were lost now; empty where they could."""
        ranks = Ranks(
            tuple(self.members), tuple(self.nodes), self.job.spec.ranks_per_node, frozenset(lost),
            frozenset(self.dead | self.left), self.warm.waiting, self.warm.coming, max(step, self._trained),
            self._tries, ended=frozenset(lost),
        )  # fmt: skip
        return plan_in_memory(ranks, faults, most_tries=max(1, self.job.spec.aegis.retries)).reason

    def refuse(self, ranks: Collection[int], reason: str) -> None:
        """Give recovery in memory up for this attempt: these ranks cannot be replaced."""
        self._lost |= set(ranks)
        self._give_up(reason)

    # --- planned moves ------------------------------------------------------------------------------------------

    @property
    def given_up(self) -> bool:
        """Whether nothing is recovered in memory in this attempt any more."""
        return self._given_up

    @property
    def _leaving(self) -> set[str]:
        """Nodes that ranks have left, or leave now."""
        return self.left | (
            {self.move.off} if self.move is not None and self.move.number <= self.number else set()
        )

    def plan_move(self, off: str, unfit: Collection[str]) -> InMemory:
        """Return who would continue as the ranks of a node, or why that is not possible now."""
        ranks = Ranks(
            tuple(self.members), tuple(self.nodes), self.job.spec.ranks_per_node, frozenset(),
            frozenset(self.dead | self.left), self.warm.waiting,
        )  # fmt: skip
        return plan_move(ranks, off, unfit=unfit)

    def begin_move(self, off: str, plan: InMemory, reason: str, request: str | None = None) -> bool:
        """Have the ranks of a node move at the next step's boundary; returns False where the store is gone."""
        ranks = tuple(rank for rank, node in enumerate(self.nodes) if node == off)
        self.move = move = Move(off, plan, ranks, self.number + 1, reason, request)
        self.job.event(
            "move_planned", attempt=self.attempt.number, off=off, to=plan.nodes[ranks[0]], ranks=list(ranks),
            reason=reason, request=request,
        )  # fmt: skip
        limit = self.job.spec.aegis.recovery_s
        if self.store.move(Generation(move.number, plan.members, ranks, limit, left=(off,))):
            return True
        self.move = None
        return False

    def _begin_move(self, number: int) -> None:
        """Note that all ranks hold at the boundary of a move, and that its generation is published."""
        move = self.move or self._overtaken
        if move is None or move.number != number or self._given_up:
            return
        now = time.monotonic()
        if self.move is None:  # a fault was noticed at the same moment: one more generation has both
            self.move, self._again = move, True
        else:
            self.number, self._planned, self._asked_at = number, move.plan, now
            self._deadline = now + self.job.spec.aegis.recovery_s + _ANSWER_S
        self._lost |= set(move.ranks)

    def _moved(self, move: Move, step: int, rolled_back: int, seconds: float) -> None:
        """Record a move that was made, perhaps together with a recovery from a fault."""
        self.left.add(move.off)
        self.warm.leave(move.off)
        self.job.event(
            "ranks_moved", attempt=self.attempt.number, generation=self.number, off=move.off,
            ranks=list(move.ranks), step=step, rolled_back=rolled_back, seconds=seconds,
            nodes=hostlist_in_order(tuple(dict.fromkeys(self.nodes))), reason=move.reason, request=move.request,
        )  # fmt: skip

    # --- what it does -------------------------------------------------------------------------------------------

    def _start_warm(self) -> None:
        Signatures.load()  # read once: not when a rank is lost
        in_use = tuple(dict.fromkeys(self.nodes))
        problem = self.warm.start(in_use) or self.warm.start(self.spares, self.job.spec.ranks_per_node)
        if problem:
            self.job.event("recovery_unavailable", attempt=self.attempt.number, reason=problem)

    def _start_more(self, plan: InMemory) -> None:
        """Start the processes that are missing, where ranks that survived wait for them."""
        now = time.monotonic()
        self._asked_at = self._asked_at or now
        self._awaits_warm, self._deadline = True, self._deadline or now + self.job.spec.aegis.recovery_s
        for node, count in plan.start.items():
            if problem := self.warm.start([node], count):
                self._give_up(problem)
                return

    def _announce(self) -> None:
        """Record once that every node has a process which waits."""
        if not self._ready and set(self.nodes) <= self.warm.waiting.keys():
            self._ready = True
            nodes = hostlist_in_order(tuple(node for node in self.warm.waiting if node not in self.dead))
            self.job.event("recovery_ready", attempt=self.attempt.number, nodes=nodes)

    def _publish(self, plan: InMemory) -> None:
        """Have the ranks regroup with the members of a plan."""
        now, recovery_s = time.monotonic(), self.job.spec.aegis.recovery_s
        if self.move is not None and self.move.number > self.number:
            self._overtaken, self.move = self.move, None
        self.number, self.unmovable = self.number + 1, False
        self._planned, self._asked_at, self._awaits_warm = plan, self._asked_at or now, False
        self._deadline = now + recovery_s + _ANSWER_S
        lost = tuple(sorted(self._lost))
        self.job.event(
            "recovery_started", attempt=self.attempt.number, generation=self.number, ranks=list(lost),
            members=None if plan.former else [plan.members[rank] for rank in lost],
        )  # fmt: skip
        generation = Generation(
            self.number, plan.members, () if plan.former else lost, recovery_s, left=tuple(sorted(self._leaving)),
            former=plan.former, former_size=len(self.members) if plan.former else 0,
        )  # fmt: skip
        if not self.store.generation(generation):
            self._give_up("the store server is gone")

    def _recovered(self, step: int, rolled_back: int) -> None:
        assert self._asked_at is not None
        plan, lost = self._planned, sorted(self._lost)
        self.resized = bool(plan.former)
        if not self.resized:
            self.warm.take({plan.members[rank] for rank in lost})
        self.dead |= self._lost_nodes
        self._new = (self._new[0] | self._lost, self._new[1] | self._lost_nodes)
        self.members, self.nodes = list(plan.members), list(plan.nodes)
        self.spares = tuple(node for node in self.spares if node not in self.nodes)
        seconds = round(time.monotonic() - self._asked_at, 3)
        move, self.move, self._overtaken = self.move, None, None
        if move is not None:
            self._moved(move, step, rolled_back, seconds)
        if by_fault := sorted(self._lost.difference(() if move is None else move.ranks)):
            self.job.event(
                "recovered_in_memory", attempt=self.attempt.number, generation=self.number, ranks=by_fault,
                step=step, rolled_back=rolled_back, seconds=seconds,
                nodes=hostlist_in_order(tuple(dict.fromkeys(self.nodes))),
                world_size=len(self.members) if self.resized else None,
            )  # fmt: skip
        self._lost, self._lost_nodes, self._deadline, self._asked_at = set(), set(), None, None
        self.ended = set()
        self._recovered_at_step, self._tries, self._ready = step, self._tries + 1, False
        used = {} if self.resized else dict.fromkeys(plan.nodes[rank] for rank in lost)
        self.warm.start([node for node in used if not (self.warm.waiting.get(node) or self.warm.coming[node])])

    def _give_up(self, reason: str) -> None:
        self._deadline, self._given_up = None, True
        self.move = None
        self.job.event(
            "recovery_failed", attempt=self.attempt.number, generation=self.number, ranks=sorted(self._lost),
            reason=reason,
        )  # fmt: skip

    @property
    def recovered(self) -> bool:
        """Whether there was a recovery since `take_recovered` was called last."""
        return bool(self._new[0])

    def take_recovered(self) -> tuple[set[int], set[str]]:
        """Return the ranks that were replaced since the last call, and the dead nodes that they were on."""
        new, self._new = self._new, (set(), set())
        return new

    def close(self) -> None:
        """End the warm processes and the store; the ranks are gone."""
        self.warm.end()
        self.store.stop()
