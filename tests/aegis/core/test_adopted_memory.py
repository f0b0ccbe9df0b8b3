"""What a supervisor makes of an attempt with recovery in memory that another one, which is gone, has started."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

import pytest

from tests.aegis.core.sites import PER_NODE, Site
from zslurm.aegis.core.adopted_memory import FoundMemory, found_memory
from zslurm.aegis.core.messages import MemoryResumed, StoreReported
from zslurm.run.events.event import Event, from_row
from zslurm.train.recovery.generation import Generation, failed, recovered

FIRST = ("n0/0", "n0/1", "n1/0", "n1/1", "n2/0", "n2/1")
KILLED = Generation(1, ("n0/0", "n0/1", "n1/0", "n1/w2", "n2/0", "n2/1"), lost=(3,))
DEAD = Generation(2, ("n0/0", "n0/1", "n3/w4", "n3/w5", "n2/0", "n2/1"), lost=(2, 3))
MOVED = Generation(1, ("n3/w4", "n3/w5", *FIRST[2:]), lost=(0, 1), left=("n0",))


def report(newest: Generation | None = None, before: Generation | None = None, **more: Any) -> dict[str, Any]:
    """What a store server reports."""
    shown = {"newest": newest, "before": before, "move": more.pop("move", None)}
    generations = {name: None if given is None else asdict(given) for name, given in shown.items()}
    as_json: dict[str, Any] = json.loads(json.dumps(generations))
    return {"outcome": None, "unmoved": 0, "warm": []} | as_json | more


def events(*rows: dict[str, Any]) -> Sequence[Event]:
    found = [from_row({"time": float(number), "attempt": 1} | row) for number, row in enumerate(rows)]
    return [event for event in found if event is not None]


def recovery(generation: int, *ranks: int, step: int = 6) -> dict[str, Any]:
    return {"event": "recovered_in_memory", "generation": generation, "ranks": list(ranks), "step": step}


def died(node: str) -> dict[str, Any]:
    fields = {
        "kind": "node_dead",
        "role": "root",
        "scope": "node",
        "source": "agent",
        "line": "",
        "fault_time": 1.0,
    }
    return {"event": "fault_detected", "node": node, **fields}


def planned(off: str) -> dict[str, Any]:
    return {
        "event": "move_planned",
        "off": off,
        "to": "n3",
        "ranks": [0, 1],
        "reason": "asked for",
        "request": "r1",
    }


def test_an_attempt_without_a_recovery_so_far() -> None:
    assert found_memory(report(), FIRST, events()) == FoundMemory(FIRST)


def test_the_members_are_those_of_the_last_recovery_that_was_recorded() -> None:
    rows = events(recovery(1, 3), died("n1"), recovery(2, 2, 3, step=9))
    found = found_memory(report(DEAD, KILLED, outcome=recovered(2, 9, 1, 0.1)), FIRST, rows)
    assert found == FoundMemory(DEAD.members, 2, 9, died=frozenset({"n1"}))


@pytest.mark.parametrize("outcome", [None, recovered(2, 9, 1, 0.1), failed(2, 0, "no whole step")])
def test_a_generation_whose_end_nobody_has_recorded_is_pending(outcome: dict[str, Any] | None) -> None:
    found = found_memory(report(DEAD, KILLED, outcome=outcome), FIRST, events(recovery(1, 3), died("n1")))
    assert (found.pending, found.outcome, found.number) == (DEAD, outcome, 2)
    assert found.members == KILLED.members, "those before it"
    assert found.died == {"n1"}


def test_ranks_that_hung_and_were_killed_since_the_last_recovery_are_known() -> None:
    hung = {"event": "hanging_ranks_ended", "nodes": "n0", "reason": "it hangs"}
    rows = events(hung | {"ranks": [0]}, recovery(1, 3), hung | {"ranks": [2]})
    assert found_memory(report(KILLED), FIRST, rows).ended == {2}


def test_a_move_that_waits_for_a_boundary_is_taken_over_and_one_that_is_under_way_is_pending() -> None:
    found = found_memory(report(move=MOVED), FIRST, events(planned("n0")))
    assert found.move is not None
    assert (found.number, found.pending) == (0, None)
    assert (found.move.off, found.move.ranks, found.move.number) == ("n0", (0, 1), 1)
    assert (found.move.reason, found.move.request) == ("asked for", "r1")
    found = found_memory(report(MOVED), FIRST, events(planned("n0")))
    assert (found.number, found.pending) == (1, MOVED)
    assert found.move is not None
    done = planned("n0") | {"event": "ranks_moved", "generation": 1, "step": 4}
    found = found_memory(report(MOVED), FIRST, events(planned("n0"), done))
    assert (found.move, found.left, found.members) == (None, frozenset({"n0"}), MOVED.members)


def test_ranks_that_held_for_a_move_in_vain_do_not_do_so_again() -> None:
    assert found_memory(report(unmoved=1), FIRST, events()).in_vain
    assert not found_memory(report(KILLED, unmoved=1), FIRST, events(recovery(1, 3))).in_vain


def test_what_had_failed_stays_given_up() -> None:
    rows = events({"event": "recovery_failed", "reason": "no whole step"})
    assert found_memory(report(KILLED), FIRST, rows).given_up


# ------------------------------------------------------------------------------------- what it does with that


class Adopted(Site):
    """A site whose supervisor has found what another one has left; the same warm processes wait."""

    def __init__(self, found: FoundMemory, *, trained: int = -1, step: int = 9) -> None:
        super().__init__()
        warm, coming = self.memory.waiting, self.memory.coming
        started = {node: len(members) + coming[node] for node, members in warm.items()}
        ready = [member for members in warm.values() for member in members]
        self.state.memory = found.state(PER_NODE, ("n0", "n1", "n2", "n3"), started, ready, trained)
        self.state.rank_nodes = found.rank_nodes
        self.events.clear()
        self.detector.step = step
        self.tell(MemoryResumed(found.pending, found.died, self.now))
        self.outcome = found.outcome

    def take_outcome(self) -> None:
        assert self.outcome is not None
        self.tell(StoreReported(self.outcome, self.now, self.now))


def test_the_next_generation_follows_on_the_one_that_was_found() -> None:
    site = Adopted(FoundMemory(KILLED.members, 1, 6))
    site.reports({"event": "warm", "member": "n1/w9"}, step=9)
    assert site.lose(3, step=9)
    assert (site.generations[-1].number, site.generations[-1].members[3]) == (2, "n1/w9")


def test_a_pending_generation_is_waited_for() -> None:
    site = Adopted(FoundMemory(FIRST, 1, pending=KILLED))
    assert site.lose(3), "which is what it was made for"
    assert site.generations == []
    site.recover(1)
    (event,) = site.recorded("recovered_in_memory")
    assert (event["ranks"], event["generation"]) == ([3], 1)
    assert site.memory.members == list(KILLED.members)
    assert site.replaced == ({3}, set())


def test_spares_whose_warm_processes_the_other_supervisor_did_not_start_get_them() -> None:
    """It died between the two starts, of which only the first one has come about."""
    site = Adopted(FoundMemory(FIRST))
    site.memory.waiting.pop("n3")
    site.asked.clear()
    site.tick()
    assert site.asked == [(("n3",), PER_NODE)]


def test_a_rank_that_is_lost_before_the_first_step_is_not_replaced() -> None:
    site = Adopted(FoundMemory(FIRST), step=-1)
    assert not site.lose(3, step=-1)
    assert site.recorded("recovery_failed")[0]["reason"].startswith("no step was finished yet")


def test_a_rank_that_is_lost_before_an_agent_reports_a_step_is_replaced() -> None:
    """The metrics have the steps from before."""
    site = Adopted(FoundMemory(FIRST), trained=5, step=-1)
    assert site.lose(3, step=-1)


def test_a_recovery_that_was_not_recorded_is_recorded_now() -> None:
    outcome = recovered(2, 9, 1, 0.1)
    site = Adopted(FoundMemory(KILLED.members, 2, 6, died=frozenset({"n1"}), pending=DEAD, outcome=outcome))
    assert site.recorded("recovered_in_memory") == [], "what was recorded is read back first"
    site.take_outcome()
    assert not site.memory.active
    assert site.recorded("recovered_in_memory")[0]["ranks"] == [2, 3]
    assert site.replaced == ({2, 3}, {"n1"})
    assert site.state.overcome_nodes == {"n1"}


def test_fewer_ranks_that_were_not_recorded_are_recorded_now() -> None:
    fewer = Generation(1, ("n0/0", "n0/1", "n2/0", "n2/1"), former=(0, 1, 4, 5), former_size=6)
    outcome = recovered(1, 9, 1, 0.1)
    site = Adopted(FoundMemory(FIRST, 1, died=frozenset({"n1"}), pending=fewer, outcome=outcome))
    site.take_outcome()
    assert site.recorded("recovered_in_memory")[0]["world_size"] == 4


def test_a_generation_that_failed_meanwhile_goes_down_a_rung() -> None:
    site = Adopted(FoundMemory(FIRST, 1, pending=KILLED, outcome=failed(1, 0, "no whole step")))
    site.take_outcome()
    assert site.recorded("recovery_failed")[0]["reason"] == "no whole step"
    assert not site.lose(3)


def test_a_move_under_way_ends_as_one() -> None:
    site = Adopted(found_memory(report(MOVED, outcome=recovered(1, 4, 0, 0.1)), FIRST, events(planned("n0"))))
    site.take_outcome()
    (moved,) = site.recorded("ranks_moved")
    assert (moved["off"], moved["ranks"], moved["step"], moved["request"]) == ("n0", [0, 1], 4, "r1")
    assert site.recorded("recovered_in_memory") == []
    assert site.memory.left == {"n0"}


def test_a_planned_move_is_made_at_its_boundary() -> None:
    site = Adopted(found_memory(report(move=MOVED), FIRST, events(planned("n0"))))
    assert not site.memory.active
    site.reports({"event": "boundary", "number": 1, "step": 7})
    assert site.memory.active
    site.recover(1, step=7)
    assert [event["off"] for event in site.recorded("ranks_moved")] == ["n0"]
