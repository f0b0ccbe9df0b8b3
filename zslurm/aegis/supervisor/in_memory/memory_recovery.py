"""The generations of one attempt: who was lost, who takes their place, and whether that worked.

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

from zslurm.aegis.core.policy.in_memory import InMemory, plan_in_memory, plan_move, why_not_in_memory
from zslurm.aegis.logs.signatures import Signatures
from zslurm.aegis.supervisor.in_memory.boundary_moves import BoundaryMoves, Move
from zslurm.aegis.supervisor.in_memory.rank_places import RankPlaces
from zslurm.aegis.supervisor.in_memory.regrouping import Regrouping
from zslurm.aegis.supervisor.in_memory.resumed import Resumed
from zslurm.aegis.supervisor.in_memory.warm_pool import WarmPool
from zslurm.aegis.supervisor.job import Job
from zslurm.aegis.supervisor.spare_checks import NO_ANSWER, SpareChecks
from zslurm.aegis.types import Fault
from zslurm.job.in_memory.store_client import StoreClient
from zslurm.run.events import (
    MovePlanned,
    RanksMoved,
    RecoveredInMemory,
    RecoveryFailed,
    RecoveryReady,
    RecoveryStarted,
    RecoveryUnavailable,
)
from zslurm.run.run_dir import AttemptDir
from zslurm.slurm.on_nodes.srun_output import TaskFailure
from zslurm.slurm.topology import hostlist_in_order
from zslurm.train.recovery.generation import Generation, node_of

_ANSWER_S = 1.0
"""Seconds beyond the deadline that the store server gets to report that it has passed."""


@dataclass
class MemoryRecovery:
    """The generations of one attempt.

    Attributes:
        job: the start of the job.
        attempt: the attempt.
        store: its store server.
        warm: its warm processes.
        places: the process and the node of each rank.
        why_not_fewer: returns why the ranks must not continue on so many nodes; empty where they may.
        number: of the newest generation.
        ended: ranks that hung, and were killed alone, since the last recovery.
        moves: the planned move that is under way.
        spare_checks: checks a spare before ranks are placed on it; None: every spare is fit.
        unfit: spares that a check found unfit.
        given_up: nothing is recovered in memory in this attempt, or not any more.
        resized: the last recovery that was taken has left out ranks.
    """

    job: Job
    attempt: AttemptDir
    store: StoreClient
    warm: WarmPool
    places: RankPlaces
    why_not_fewer: Callable[[int], str] = lambda nodes: "aegis.min_nodes is not set"
    number: int = 0
    ended: set[int] = field(default_factory=set)
    moves: BoundaryMoves = field(default_factory=BoundaryMoves)
    spare_checks: SpareChecks | None = None
    unfit: set[str] = field(default_factory=set)
    given_up: bool = False
    resized: bool = False

    def __post_init__(self) -> None:
        """Nothing is lost yet."""
        self._regrouping: Regrouping | None = None
        self._ready = False  # the event that says so was recorded
        self._recovered_at_step, self._tries = -1, 0
        self._trained = -1  # the step that an earlier supervisor has seen finished
        self._known: list[Mapping[str, Any]] = []  # events of the server that were not taken yet
        self._new: tuple[set[int], set[str]] = (set(), set())

    # --- what the monitor asks ----------------------------------------------------------------------------------

    @property
    def active(self) -> bool:
        """Whether the ranks regroup now, so that nothing else must be done about them."""
        return self._regrouping is not None

    @property
    def holds_ranks(self) -> bool:
        """Whether ranks may be in the steps of warm processes."""
        return any("/w" in member for member in self.places.members) and self.warm.runs

    def tend(self, step: int) -> None:
        """Take what the server reports, and have warm processes ready once the ranks train."""
        known, self._known = self._known, []
        for event in (*known, *self.store.poll()):
            self._take(event)
        regrouping = self._regrouping
        if regrouping is not None and time.monotonic() > regrouping.deadline:
            if regrouping.awaits_check:
                late = "the check of a spare did not end"
            elif regrouping.awaits_warm:
                late = "no process was ready to take a place"
            else:
                late = "the ranks did not regroup"
            self._give_up(f"{late} within {self.job.spec.aegis.recovery_s:g} s (aegis.recovery_s)")
        if self.active and self.store.has_ended:
            self._give_up("the store server of the ranks has ended")
        if step >= 0 and not self.warm.started and not self.given_up:
            self._start_warm()

    def _take(self, event: Mapping[str, Any]) -> None:
        """Take one event of the server."""
        kind, number = event.get("event"), event.get("number")
        if kind == "warm":
            self.warm.add(str(event.get("member")))
            if self._regrouping is not None:
                self._regrouping.plan_again |= self._regrouping.awaits_warm
            self._announce()
        elif kind == "recovered" and number == self.number and self._regrouping is not None:
            self._recovered(self._regrouping, int(event.get("step", -1)), int(event.get("rolled_back", 0)))
        elif kind == "off":
            self._turn_off(str(event.get("reason")))
        elif kind == "boundary":
            self._begin_move(int(event.get("number", 0)))
        elif kind == "unmoved":
            self.moves.give_up(number)
        elif kind == "refused" and self.moves.was_refused(number):
            pass  # the generation of a fault came too late: that of a move was there; the next one has both
        elif kind in ("failed", "refused") and event.get("number", self.number) == self.number and self.active:
            self._give_up(str(event.get("reason", "the ranks gave no reason")))

    def resume(self, found: Resumed) -> None:
        """Continue where an earlier supervisor of this attempt has left off."""
        members = list(found.members)
        self.places = places = RankPlaces(
            self.places.per_node, [node_of(member) for member in members], self.places.spares, members,
            set(found.dead), set(found.left),
        )  # fmt: skip
        self.number, self.ended, self.given_up = found.number, set(found.ended), found.given_up
        self.moves = BoundaryMoves(found.move, in_vain=found.in_vain)
        self._recovered_at_step, self._trained = found.step, found.trained
        self._tries = 1 if found.step >= 0 else 0
        if found.given_up:
            return
        self._announce()
        if (generation := found.pending) is None:
            return
        now, nodes = time.monotonic(), tuple(node_of(member) for member in generation.members)
        left_out = set(range(generation.former_size)).difference(generation.former)
        lost = left_out or set(generation.lost)
        self._regrouping = Regrouping(
            now,
            now + self.job.spec.aegis.recovery_s + _ANSWER_S,
            lost=lost,
            dead={places.nodes[rank] for rank in lost} & set(found.died),
            plan=InMemory(generation.members, nodes, generation.former),
        )
        if found.outcome is not None:
            # Taken when the monitor asks: what is recorded now it would read back as recorded before.
            self._known.append(found.outcome)

    def lost_members(self) -> list[tuple[int, TaskFailure]]:
        """Return ranks whose process was a warm one and has failed since the last call, and how."""
        ended, members = self.warm.ended(), self.places.members
        if (regrouping := self._regrouping) is not None:
            on_their_way = set(regrouping.plan.members).difference(members)
            lost = sum(member in on_their_way for member, _ in ended)
            regrouping.replacements_lost += lost
            regrouping.plan_again |= bool(lost) or (regrouping.awaits_warm and bool(ended))
        return [(members.index(member), failure) for member, failure in ended if member in members]

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
        if self.given_up:
            return False
        step = max(step, self._trained)
        on_dead = self.places.on(dead)
        gone, under_way = set(lost) | on_dead, self._regrouping
        if under_way is None and not gone:
            return False
        if under_way is not None and not (gone - under_way.lost or under_way.plan_again):
            return True
        now = time.monotonic()
        self._regrouping = regrouping = under_way or Regrouping(now, now + self.job.spec.aegis.recovery_s)
        regrouping.plan_again = False
        regrouping.lost |= gone
        regrouping.dead |= {self.places.nodes[rank] for rank in on_dead}
        if step > self._recovered_at_step:
            self._tries = 0
        plan = self._plan(regrouping, faults, step)
        if plan is None:
            regrouping.plan_again = True
        elif plan.waits:
            self._start_more(regrouping, plan)
        elif plan.possible:
            self._publish(regrouping, plan)
        else:
            self._give_up(plan.reason)
        return self.active

    def _plan(self, regrouping: Regrouping, faults: Sequence[Fault], step: int) -> InMemory | None:
        """Return who takes the places of lost ranks, on spares that are fit; None while these are checked."""
        fit: bool | None = False
        while fit is False:
            ranks = self.places.seen_with(
                self.warm,
                lost=regrouping.lost,
                unusable=regrouping.dead | self.unfit | self.moves.leaving(self.number),
                step=step,
                tries=self._tries + regrouping.replacements_lost,
                ended=self.ended,
                planned=regrouping.planned_members,
            )
            plan = plan_in_memory(ranks, faults, most_tries=self._most_tries, why_not_fewer=self.why_not_fewer)
            fit = self.has_fit_spares(plan)
        regrouping.awaits_check = fit is None
        return plan if fit else None

    def has_fit_spares(self, plan: InMemory) -> bool | None:
        """Check the spares that a plan places ranks on; return whether all are fit, None until that is known.

        One that is not fit is excluded. One whose agent does not answer in time is only not used in this attempt.
        """
        spares = set(plan.nodes).difference(self.places.nodes)
        if self.spare_checks is None or not spares:
            return True
        reasons = self.spare_checks.unfit(spares)
        for node, reason in (reasons or {}).items():
            self.unfit.add(node)
            if reason != NO_ANSWER:
                self.job.exclude([node], f"spare {node} is not fit: {reason}", self.attempt.number)
        return None if reasons is None else not reasons

    @property
    def _most_tries(self) -> int:
        return max(1, self.job.spec.aegis.retries)

    def leave(self, fault: Fault) -> None:
        """Record why a fault is not recovered from in memory that ends the attempt with no rank lost yet."""
        if not self.given_up:
            self._give_up(why_not_in_memory(fault))

    def why_not(self, lost: Collection[int], faults: Sequence[Fault], step: int) -> str:
        """Return why ranks could not be replaced if they were lost now; empty where they could."""
        step = max(step, self._trained)
        ranks = self.places.seen_with(self.warm, lost=lost, step=step, tries=self._tries, ended=lost)
        return plan_in_memory(ranks, faults, most_tries=self._most_tries).reason

    def refuse(self, ranks: Collection[int], reason: str) -> None:
        """Give recovery in memory up for this attempt: these ranks cannot be replaced."""
        self._give_up(reason, ranks)

    # --- planned moves ------------------------------------------------------------------------------------------

    def plan_move(self, off: str, unfit: Collection[str]) -> InMemory:
        """Return who would continue as the ranks of a node, or why that is not possible now."""
        return plan_move(self.places.seen_with(self.warm), off, unfit=unfit)

    def begin_move(self, off: str, plan: InMemory, reason: str, request: str | None = None) -> bool:
        """Have the ranks of a node move at the next step's boundary; returns False where the store is gone."""
        self._forget_checks()
        ranks = tuple(sorted(self.places.on([off])))
        self.moves.move = move = Move(off, plan, ranks, self.number + 1, reason, request)
        self.job.record(
            MovePlanned(
                attempt=self.attempt.number,
                off=off,
                to=plan.nodes[ranks[0]],
                ranks=list(ranks),
                reason=reason,
                request=request,
            )
        )
        limit = self.job.spec.aegis.recovery_s
        if self.store.move(Generation(move.number, plan.members, ranks, limit, left=(off,))):
            return True
        self.moves.move = None
        return False

    def _begin_move(self, number: int) -> None:
        """Note that all ranks hold at the boundary of a move, and that its generation is published."""
        moves = self.moves
        move = moves.move or moves.overtaken
        if move is None or move.number != number or self.given_up:
            return
        now, faulty = time.monotonic(), self._regrouping
        deadline = now + self.job.spec.aegis.recovery_s + _ANSWER_S
        self._regrouping = regrouping = faulty or Regrouping(now, deadline)
        regrouping.lost |= set(move.ranks)
        regrouping.plan_again = faulty is not None  # at the same moment: one more generation has both
        if moves.move is not None:
            self.number, regrouping.plan, regrouping.deadline = number, move.plan, deadline
        moves.move = move

    def _moved(self, move: Move, step: int, rolled_back: int, seconds: float) -> None:
        """Record a move that was made, perhaps together with a recovery from a fault."""
        self.places.left.add(move.off)
        self.warm.leave(move.off)
        self.job.record(
            RanksMoved(
                attempt=self.attempt.number,
                generation=self.number,
                off=move.off,
                ranks=list(move.ranks),
                step=step,
                rolled_back=rolled_back,
                seconds=seconds,
                nodes=hostlist_in_order(self.places.in_use),
                reason=move.reason,
                request=move.request,
            )
        )

    # --- what it does -------------------------------------------------------------------------------------------

    def _start_warm(self) -> None:
        Signatures.load()  # read once: not when a rank is lost
        places = self.places
        problem = self.warm.start(places.in_use) or self.warm.start(places.spares, places.per_node)
        if problem:
            self.job.record(RecoveryUnavailable(attempt=self.attempt.number, reason=problem))

    def _start_more(self, regrouping: Regrouping, plan: InMemory) -> None:
        """Start the processes that are missing, where ranks that survived wait for them."""
        regrouping.awaits_warm = True
        for node, count in plan.start.items():
            if problem := self.warm.start([node], count):
                self._give_up(problem)
                return

    def _announce(self) -> None:
        """Record once that every node has a process which waits."""
        if not self._ready and set(self.places.nodes) <= self.warm.waiting.keys():
            self._ready = True
            nodes = hostlist_in_order(tuple(node for node in self.warm.waiting if node not in self.places.dead))
            self.job.record(RecoveryReady(attempt=self.attempt.number, nodes=nodes))

    def _publish(self, regrouping: Regrouping, plan: InMemory) -> None:
        """Have the ranks regroup with the members of a plan."""
        recovery_s = self.job.spec.aegis.recovery_s
        self.moves.overtake(self.number)
        self.number += 1
        regrouping.plan, regrouping.awaits_warm = plan, False
        regrouping.deadline = time.monotonic() + recovery_s + _ANSWER_S
        lost = tuple(sorted(regrouping.lost))
        self.job.record(
            RecoveryStarted(
                attempt=self.attempt.number,
                generation=self.number,
                ranks=list(lost),
                members=None if plan.former else [plan.members[rank] for rank in lost],
            )
        )
        left = self.places.left | self.moves.leaving(self.number)
        generation = Generation(
            self.number, plan.members, () if plan.former else lost, recovery_s, left=tuple(sorted(left)),
            former=plan.former, former_size=len(self.places.members) if plan.former else 0,
        )  # fmt: skip
        if not self.store.generation(generation):
            self._give_up("the store server of the ranks is gone")

    def _recovered(self, regrouping: Regrouping, step: int, rolled_back: int) -> None:
        plan, lost, places = regrouping.plan, sorted(regrouping.lost), self.places
        self.resized = bool(plan.former)
        if not self.resized:
            self.warm.take({plan.members[rank] for rank in lost})
        self._new = (self._new[0] | regrouping.lost, self._new[1] | regrouping.dead)
        places.take(plan, regrouping.dead)
        seconds = round(time.monotonic() - regrouping.began, 3)
        move = self.moves.take()
        if move is not None:
            self._moved(move, step, rolled_back, seconds)
        if by_fault := sorted(regrouping.lost.difference(() if move is None else move.ranks)):
            self.job.record(
                RecoveredInMemory(
                    attempt=self.attempt.number,
                    generation=self.number,
                    ranks=by_fault,
                    step=step,
                    rolled_back=rolled_back,
                    seconds=seconds,
                    nodes=hostlist_in_order(places.in_use),
                    world_size=len(places.members) if self.resized else None,
                )
            )
        self._regrouping, self.ended = None, set()
        self._forget_checks()
        self._recovered_at_step, self._tries, self._ready = step, self._tries + 1, False
        used = {} if self.resized else dict.fromkeys(plan.nodes[rank] for rank in lost)
        self.warm.start([node for node in used if not (self.warm.waiting.get(node) or self.warm.coming[node])])

    def _turn_off(self, reason: str) -> None:
        """Recover nothing in memory, though nothing was lost so far."""
        if self.active:
            self._give_up(reason)
        elif not self.given_up:
            self.given_up, self.moves.move = True, None
            self.job.record(RecoveryUnavailable(attempt=self.attempt.number, reason=reason))

    def _give_up(self, reason: str, ranks: Collection[int] = ()) -> None:
        lost = set(ranks).union(self._regrouping.lost if self._regrouping is not None else ())
        self._regrouping, self.given_up, self.moves.move = None, True, None
        self._forget_checks()
        self.job.record(
            RecoveryFailed(attempt=self.attempt.number, generation=self.number, ranks=sorted(lost), reason=reason)
        )

    def _forget_checks(self) -> None:
        if self.spare_checks is not None:
            self.spare_checks.forget()

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
