"""What a supervisor makes of an attempt with recovery in memory that another one, which is gone, has started."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from tests.aegis.supervisor.in_memory.test_memory_recovery import Site
from zslurm.aegis.supervisor.in_memory.adoption import resumed
from zslurm.aegis.supervisor.in_memory.resumed import Resumed
from zslurm.aegis.supervisor.in_memory.warm_pool import WarmPool
from zslurm.aegis.supervisor.job import Job
from zslurm.core.processes import DetachedProcess
from zslurm.job.preparation.interpreter import Interpreter
from zslurm.run.events.event import Event, from_row
from zslurm.run.run_dir import RunDir
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
    assert resumed(report(), FIRST, events()) == Resumed(FIRST)


def test_the_members_are_those_of_the_last_recovery_that_was_recorded() -> None:
    rows = events(recovery(1, 3), died("n1"), recovery(2, 2, 3, step=9))
    found = resumed(report(DEAD, KILLED, outcome=recovered(2, 9, 1, 0.1)), FIRST, rows)
    assert found == Resumed(DEAD.members, 2, 9, dead=frozenset({"n1"}), died=frozenset({"n1"}))


@pytest.mark.parametrize("outcome", [None, recovered(2, 9, 1, 0.1), failed(2, 0, "no whole step")])
def test_a_generation_whose_end_nobody_has_recorded_is_pending(outcome: dict[str, Any] | None) -> None:
    found = resumed(report(DEAD, KILLED, outcome=outcome), FIRST, events(recovery(1, 3), died("n1")))
    assert (found.pending, found.outcome, found.number) == (DEAD, outcome, 2)
    assert found.members == KILLED.members, "those before it"
    assert (found.dead, found.died) == (frozenset(), frozenset({"n1"})), "its ranks are being replaced now"


def test_ranks_that_hung_and_were_killed_since_the_last_recovery_are_known() -> None:
    hung = {"event": "hanging_ranks_ended", "nodes": "n0", "reason": "it hangs"}
    rows = events(hung | {"ranks": [0]}, recovery(1, 3), hung | {"ranks": [2]})
    assert resumed(report(KILLED), FIRST, rows).ended == {2}


def test_a_move_that_waits_for_a_boundary_is_taken_over_and_one_that_is_under_way_is_pending() -> None:
    found = resumed(report(move=MOVED), FIRST, events(planned("n0")))
    assert found.move is not None
    assert (found.number, found.pending) == (0, None)
    assert (found.move.off, found.move.ranks, found.move.number) == ("n0", (0, 1), 1)
    assert (found.move.reason, found.move.request) == ("asked for", "r1")
    found = resumed(report(MOVED), FIRST, events(planned("n0")))
    assert (found.number, found.pending) == (1, MOVED)
    assert found.move is not None
    done = planned("n0") | {"event": "ranks_moved", "generation": 1, "step": 4}
    found = resumed(report(MOVED), FIRST, events(planned("n0"), done))
    assert (found.move, found.left, found.members) == (None, frozenset({"n0"}), MOVED.members)


def test_ranks_that_held_for_a_move_in_vain_do_not_do_so_again() -> None:
    assert resumed(report(unmoved=1), FIRST, events()).in_vain
    assert not resumed(report(KILLED, unmoved=1), FIRST, events(recovery(1, 3))).in_vain


def test_what_had_failed_stays_given_up() -> None:
    rows = events({"event": "recovery_failed", "reason": "no whole step"})
    assert resumed(report(KILLED), FIRST, rows).given_up


# ------------------------------------------------------------------------------------- what it does with that


@pytest.fixture
def site(tmp_path: Path) -> Site:
    return Site(tmp_path)


def test_the_next_generation_follows_on_the_one_that_was_found(site: Site) -> None:
    site.memory.resume(Resumed(KILLED.members, 1, 6))
    site.pool.take(["n1/w2"])
    site.reports({"event": "warm", "member": "n1/w9"}, step=9)
    assert site.lose(3, step=9)
    assert (site.store.generations[-1].number, site.store.generations[-1].members[3]) == (2, "n1/w9")


def test_a_pending_generation_is_waited_for(site: Site) -> None:
    site.memory.resume(Resumed(FIRST, 1, pending=KILLED))
    assert site.lose(3), "which is what it was made for"
    assert site.store.generations == []
    site.recover(1)
    (event,) = site.recorded("recovered_in_memory")
    assert (event["ranks"], event["generation"]) == ([3], 1)
    assert site.memory.places.members == list(KILLED.members)
    assert site.memory.take_recovered() == ({3}, set())


def test_a_rank_that_is_lost_before_the_first_step_is_not_replaced(site: Site) -> None:
    site.memory.resume(Resumed(FIRST))
    assert not site.lose(3, step=-1)
    assert site.recorded("recovery_failed")[0]["reason"].startswith("no step was finished yet")


def test_a_rank_that_is_lost_before_an_agent_reports_a_step_is_replaced(site: Site) -> None:
    """The metrics have the steps from before."""
    site.memory.resume(Resumed(FIRST, trained=5))
    assert site.lose(3, step=-1)


def test_a_recovery_that_was_not_recorded_is_recorded_now(site: Site) -> None:
    site.memory.resume(
        Resumed(KILLED.members, 2, 6, died=frozenset({"n1"}), pending=DEAD, outcome=recovered(2, 9, 1, 0.1))
    )
    assert site.recorded("recovered_in_memory") == [], "what was recorded is read back first"
    site.memory.tend(9)
    assert not site.memory.active
    assert site.recorded("recovered_in_memory")[0]["ranks"] == [2, 3]
    assert site.memory.take_recovered() == ({2, 3}, {"n1"})
    assert site.memory.places.dead == {"n1"}


def test_fewer_ranks_that_were_not_recorded_are_recorded_now(site: Site) -> None:
    fewer = Generation(1, ("n0/0", "n0/1", "n2/0", "n2/1"), former=(0, 1, 4, 5), former_size=6)
    site.memory.resume(Resumed(FIRST, 1, died=frozenset({"n1"}), pending=fewer, outcome=recovered(1, 9, 1, 0.1)))
    site.memory.tend(9)
    assert (site.recorded("recovered_in_memory")[0]["world_size"], site.memory.resized) == (4, True)


def test_a_generation_that_failed_meanwhile_goes_down_a_rung(site: Site) -> None:
    site.memory.resume(Resumed(FIRST, 1, pending=KILLED, outcome=failed(1, 0, "no whole step")))
    site.memory.tend(9)
    assert site.recorded("recovery_failed")[0]["reason"] == "no whole step"
    assert not site.lose(3)


def test_a_move_under_way_ends_as_one(site: Site) -> None:
    found = resumed(report(MOVED, outcome=recovered(1, 4, 0, 0.1)), FIRST, events(planned("n0")))
    site.memory.resume(found)
    site.memory.tend(9)
    (moved,) = site.recorded("ranks_moved")
    assert (moved["off"], moved["ranks"], moved["step"], moved["request"]) == ("n0", [0, 1], 4, "r1")
    assert site.recorded("recovered_in_memory") == []
    assert site.memory.places.left == {"n0"}


def test_a_planned_move_is_made_at_its_boundary(site: Site) -> None:
    site.memory.resume(resumed(report(move=MOVED), FIRST, events(planned("n0"))))
    assert not site.memory.active
    site.reports({"event": "boundary", "number": 1, "step": 7})
    assert site.memory.active
    site.recover(1, step=7)
    assert [event["off"] for event in site.recorded("ranks_moved")] == ["n0"]


# -------------------------------------------------------------------------------------------------- warm processes


def test_steps_of_warm_processes_are_found_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One process of three is ready, one has failed, the third is on its way."""
    attempt = RunDir(tmp_path).attempt(1)
    attempt.path.mkdir(parents=True)
    job = cast(Job, SimpleNamespace(on_slurm=False, run=RunDir(tmp_path), slurm_id=None))
    started: list[dict[str, Any]] = []

    def start(
        command: Sequence[str], *, log: Path, record_file: Path, exit_file: Path, **_: Any
    ) -> DetachedProcess:
        started.append({"command": command})
        record_file.write_text(json.dumps({"pid": 1 << 22, "created": 1.0, "host": "gone"}))
        log.write_text("srun: error: n0: task 1: Killed\n")
        found = DetachedProcess.adopt(record_file, exit_file)
        assert found is not None
        return found

    monkeypatch.setattr(DetachedProcess, "start", start)
    python = Interpreter.own({})
    assert WarmPool(job, attempt, python).start(["n0"], 3) == ""
    pool = WarmPool(job, attempt, python)
    assert not pool.started
    pool.adopt()
    assert (pool.started, pool.coming["n0"]) == (True, 3)
    pool.add("n0/w1")
    ((member, failure),) = pool.ended()
    assert (member, failure.what) == ("n0/w2", "Killed")
    assert (pool.waiting, pool.coming["n0"]) == ({"n0": ["n0/w1"]}, 1)
    pool.start(["n0"])
    assert (attempt.path / "warm-00004.json").exists(), "numbers are not given twice"
