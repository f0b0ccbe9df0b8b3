"""Each invariant can fail: with a defect in the core, or in its shell, random schedules find a violation of it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest

from tests.aegis.simulation.__main__ import show
from tests.aegis.simulation.invariants import INVARIANTS
from tests.aegis.simulation.schedules import Schedule, drawn
from tests.aegis.simulation.simulation import play, violates
from zslurm.aegis.core import following, hanging, memory, step
from zslurm.aegis.core.attempt import AttemptState
from zslurm.aegis.core.detection import dead_nodes
from zslurm.aegis.core.messages import GiveUp, Resumed, Tick
from zslurm.aegis.core.policy import policy
from zslurm.aegis.core.policy.hanging import Hanging
from zslurm.aegis.core.policy.in_memory import InMemory
from zslurm.aegis.simulation.run import Run
from zslurm.aegis.simulation.supervisor import SimulatedSupervisor
from zslurm.aegis.simulation.world import Happening
from zslurm.aegis.types import Decision, Resources

MOST_SCHEDULES = 400
"""Drawn schedules in which a defect must show itself."""

LIVING = "a living node is never called dead"

Plant = Callable[[pytest.MonkeyPatch], None]


def excludes_a_node_more(patch: pytest.MonkeyPatch) -> None:
    decide = following.decide

    def decide_more(summary: Any, history: Any, resources: Resources, settings: Any) -> Decision:
        decision = decide(summary, history, resources, settings)
        return replace(decision, exclude=resources.in_use[-1:]) if decision.action == "requeue" else decision

    patch.setattr(following, "decide", decide_more)


def excludes_without_limit(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(policy, "most_excluded", lambda *_: 1000)


def forgets_what_an_earlier_supervisor_recorded(patch: pytest.MonkeyPatch) -> None:
    def resume_nothing(state: AttemptState, event: Resumed) -> list[Any]:
        return []

    patch.setattr(step, "_resume", resume_nothing)


def takes_silence_for_death(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(dead_nodes.DeadNodes, "_why_dead", lambda *_, **__: "its agent misses heartbeats")
    patch.setattr(dead_nodes.DeadNodes, "_continues_without", lambda *_: False)


def ends_attempts_after_20_steps(patch: pytest.MonkeyPatch) -> None:
    why_give_up = step._why_give_up

    def give_up(state: AttemptState, event: Tick) -> GiveUp | None:
        return GiveUp("enough") if state.detector.step == 20 else why_give_up(state, event)

    patch.setattr(step, "_why_give_up", give_up)


def restarts_bugs_for_ever(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(policy._Case, "hopeless", lambda _: None)
    patch.setattr(policy._Case, "over_a_limit", lambda _: None)


def kills_every_rank_that_waits(patch: pytest.MonkeyPatch) -> None:
    def all_ranks(_: Any) -> Hanging:
        return Hanging(frozenset({0, 1}))

    patch.setattr(hanging, "who_hangs", all_ranks)


def requeues_before_the_ranks_have_ended(patch: pytest.MonkeyPatch) -> None:
    def follow_at_once(supervisor: SimulatedSupervisor) -> None:
        assert supervisor.attempt is not None
        supervisor._collect(over=True)
        supervisor._follow(supervisor.attempt)

    patch.setattr(SimulatedSupervisor, "_clear", follow_at_once)


def never_recovers_in_memory(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(memory, "plan_in_memory", lambda *_, **__: InMemory(reason="not today"))


def forgets_to_decide(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(following, "_decide", lambda *_: [])


def counts_no_answer_as_no_node(patch: pytest.MonkeyPatch) -> None:
    elsewhere = SimulatedSupervisor._elsewhere
    patch.setattr(
        SimulatedSupervisor, "_elsewhere", lambda supervisor, excluded: elsewhere(supervisor, excluded) or 0
    )


def leaves_helper_jobs_in_the_queue(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Run, "end_helpers", lambda _: None)


def forgets_its_lease(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(SimulatedSupervisor, "has_run", True)


def takes_no_answer_for_a_wish_of_a_person(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(SimulatedSupervisor, "_asks_who_stopped_them", lambda *_: False)


def requeues_without_a_record(patch: pytest.MonkeyPatch) -> None:
    record = Run.record

    def record_others(run: Run, kind: str, time: float, /, **fields: Any) -> None:
        if kind != "requeued":
            record(run, kind, time, **fields)

    patch.setattr(Run, "record", record_others)


def hurt(nodes: int) -> Schedule:
    """GPUs of so many nodes lose data, one after the other."""
    happenings = tuple(Happening(15 + 20 * number, "ecc_error", number) for number in range(nodes))
    return Schedule(2, nodes, 2 + 2 * nodes, happenings)


LINK_DOWN = Schedule(3, 0, 5, (Happening(20, "nic_down", 1, 100),))
RANK_KILLED = Schedule(3, 1, 5, (Happening(20, "rank_killed", 3),), in_memory=True)
HELPED = Schedule(3, 0, 5, (Happening(20, "node_dies", 1),), in_memory=True, helped=True)
CUT_OFF = Schedule(3, 0, 7, (Happening(20, "cut_off", 0, 200),))

DEFECTS: dict[str, tuple[Plant, Sequence[Schedule]]] = {
    "a healthy node is never excluded": (excludes_a_node_more, ()),
    "at most the allowed number of nodes is excluded": (excludes_without_limit, (hurt(6),)),
    "nothing is recorded twice": (forgets_what_an_earlier_supervisor_recorded, ()),
    LIVING: (takes_silence_for_death, ()),
    "a healthy attempt is not ended": (ends_attempts_after_20_steps, ()),
    "a bug stops the run within its limit of restarts": (restarts_bugs_for_ever, ()),
    "a healthy rank is not killed alone": (kills_every_rank_that_waits, ()),
    "no attempt runs that is requeued": (requeues_before_the_ranks_have_ended, (LINK_DOWN,)),
    "what is recoverable in memory costs no restart": (never_recovers_in_memory, (RANK_KILLED,)),
    "every run ends": (forgets_to_decide, ()),
    "nothing is decided by an unknown answer": (counts_no_answer_as_no_node, ()),
    "a run waits only for what its events say": (requeues_without_a_record, ()),
    "no action by a supervisor that no longer has the run": (forgets_its_lease, (CUT_OFF,)),
    "helper jobs end with the run": (leaves_helper_jobs_in_the_queue, (HELPED,)),
    "a run that nobody stops is not interrupted": (takes_no_answer_for_a_wish_of_a_person, ()),
}
"""Each invariant by its name, with a defect that violates it, and what is played beside drawn schedules."""


def test_every_invariant_has_a_defect() -> None:
    assert len(DEFECTS) == len(INVARIANTS) + 1  # that every run ends is checked by `play`


@pytest.mark.parametrize("name", DEFECTS)
def test_a_planted_defect_violates_its_invariant(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    plant, first = DEFECTS[name]
    assert all(play(schedule).violation is None for schedule in first)
    plant(monkeypatch)
    schedules = (*first, *map(drawn, range(MOST_SCHEDULES)))
    violations = (play(schedule).violation for schedule in schedules)
    assert any(violation is not None and violation.name == name for violation in violations)


def test_a_violation_prints_its_seed_the_shortest_schedule_and_the_state_at_each_step(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    takes_silence_for_death(monkeypatch)
    seed = next(seed for seed in range(MOST_SCHEDULES) if play(drawn(seed)).violation is not None)
    assert show(seed, drawn(seed)) == 1
    first, schedule, *story = capsys.readouterr().out.splitlines()
    assert first.startswith(f"seed {seed}: ")
    assert violates(eval(schedule, {"Schedule": Schedule, "Happening": Happening}), LIVING)
    assert sum("world: attempt 1" in line for line in story) == sum("Aegis: watches" in line for line in story) > 0
    assert any("recovery_ready: attempt 1, nodes node[" in line for line in story)
    assert story[-1].startswith("VIOLATED at ") and LIVING in story[-1]
