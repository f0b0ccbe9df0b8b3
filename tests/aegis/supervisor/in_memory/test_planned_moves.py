"""The supervisor's part in planned moves: requests, faults, one node after the other, and what interrupts."""

from __future__ import annotations

import json
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from tests.aegis.supervisor.in_memory.test_memory_recovery import Site
from tests.waiting import wait_for
from zslurm.aegis.fault_kinds import GPU_RAS_UNCORRECTABLE, NODE_DRAINED, STRAGGLER
from zslurm.aegis.supervisor.in_memory.planned_moves import PlannedMoves
from zslurm.aegis.supervisor.job import Job
from zslurm.aegis.types import Fault
from zslurm.run.run_dir import RunDir


class Moving(Site):
    """A site whose run can be asked to move ranks."""

    def __init__(self, directory: Path, *, memory: bool = True, **aegis: Any) -> None:
        super().__init__(directory, **aegis)
        self.run = RunDir(directory)
        job = SimpleNamespace(
            run=self.run, spec=self.memory.job.spec, job_id="7", on_slurm=False,
            stop=SimpleNamespace(asked=False), record=self.memory.job.record,
        )  # fmt: skip
        self.job = cast(Job, job)
        job.exclude = partial(Job.exclude, self.job)
        self.moves = PlannedMoves(self.job, 1, self.memory if memory else None)

    def ask(self, off: str, request: str = "r1", job_id: str = "7") -> None:
        row = {"time": 1.0, "action": "move", "job_id": job_id, "user": "ann", "off": off, "request": request}
        with self.run.submissions.open("a") as file:
            file.write(json.dumps(row) + "\n")

    def tend(self, *faults: Fault) -> None:
        self.moves._look_at = 0.0
        self.moves.tend(faults)

    def boundary(self, number: int, step: int = 6) -> None:
        self.reports({"event": "boundary", "number": number, "step": step})

    def moved(self, number: int, step: int = 6) -> None:
        self.reports({"event": "recovered", "number": number, "step": step, "rolled_back": 0, "seconds": 0.1})

    @property
    def planned(self) -> list[tuple[str, str]]:
        return [(event["off"], event["to"]) for event in self.recorded("move_planned")]

    @property
    def refused(self) -> list[tuple[str, str]]:
        return [(event["off"], event["reason"]) for event in self.recorded("move_refused")]

    def add_node(self, node: str) -> None:
        """Let the ranks be on one more node."""
        self.memory.places.members += [f"{node}/0", f"{node}/1"]
        self.memory.places.nodes += [node, node]
        self.reports({"event": "warm", "member": f"{node}/w8"})


@pytest.fixture
def site(tmp_path: Path) -> Moving:
    return Moving(tmp_path)


def test_a_request_moves_a_node_s_ranks_to_the_spare(site: Moving) -> None:
    site.ask("n1")
    site.tend()
    (generation,) = site.store.moves
    assert (generation.number, generation.lost, generation.left) == (1, (2, 3), ("n1",))
    assert generation.members == ("n0/0", "n0/1", "n3/w4", "n3/w5", "n2/0", "n2/1")
    assert not site.memory.active, "the ranks train on until their boundary"
    site.boundary(1)
    assert site.memory.active
    site.moved(1)
    (event,) = site.recorded("ranks_moved")
    assert (event["off"], event["ranks"], event["step"], event["rolled_back"]) == ("n1", [2, 3], 6, 0)
    assert (event["request"], event["reason"], event["nodes"]) == ("r1", "asked for by ann", "n[0,3],n2")
    assert site.recorded("recovered_in_memory") == [], "nothing was lost"
    assert site.memory.take_recovered() == ({2, 3}, set()), "and no node is dead"
    site.tend()
    (excluded,) = site.recorded("nodes_excluded")
    assert (excluded["nodes"], excluded["reason"]) == ("n1", "the ranks moved off it: asked for by ann")
    site.reports({"event": "warm", "member": "n1/w8"})
    assert "n1" not in site.pool.waiting, "no process of the node is used any more"


def test_a_spare_is_checked_before_ranks_move_to_it(site: Moving) -> None:
    checked = site.check_spares(n3="memory: 0.1 GB is left")
    site.memory.places.spares = ("n3", "n4")
    site.reports(*({"event": "warm", "member": name} for name in ("n4/w6", "n4/w7")))
    site.ask("n1")

    def planned() -> bool:
        site.tend()
        return bool(site.planned)

    wait_for(planned, "the checks")
    assert site.planned == [("n1", "n4")]
    assert checked == [{"n3"}, {"n4"}]
    assert [row["nodes"] for row in site.recorded("nodes_excluded")] == ["n3"]


def test_a_move_without_a_fit_spare_is_refused(site: Moving) -> None:
    site.check_spares(n3="memory: 0.1 GB is left")
    site.ask("n1")

    def refused() -> bool:
        site.tend()
        return bool(site.refused)

    wait_for(refused, "the check")
    assert site.store.moves == []
    assert site.refused == [("n1", "no spare node has 2 warm processes")]


def test_a_request_is_answered_once_and_by_its_own_job(site: Moving) -> None:
    site.ask("n1", job_id="6")
    site.ask("n9", "r2")
    site.tend()
    site.tend()
    assert site.refused == [("n9", "no rank is on n9 (ranks are on n[0-2])")]
    with site.run.events.open("w") as file:
        file.write(json.dumps({"event": "move_refused", "time": 2.0, "job_id": "7", "off": "n9", "reason": "no",
                               "request": "r2"}) + "\n")  # fmt: skip
    site.moves = PlannedMoves(site.job, 2, site.memory)
    site.tend()
    assert len(site.refused) == 1, "the next supervisor does not answer it again"


def test_two_nodes_are_left_one_after_the_other(site: Moving) -> None:
    site.memory.places.spares = ("n3", "n4")
    site.reports(*({"event": "warm", "member": name} for name in ("n4/w6", "n4/w7")))
    site.ask("n[0,1]")
    site.tend()
    site.tend()
    assert site.planned == [("n0", "n3")]
    site.boundary(1)
    site.tend()
    assert site.planned == [("n0", "n3")]
    site.moved(1)
    site.tend()
    site.tend()
    assert site.planned == [("n0", "n3"), ("n1", "n4")], "their copies are with each other's ranks"


def test_without_a_spare_it_is_refused(site: Moving) -> None:
    site.memory.places.spares = ()
    site.pool.waiting.pop("n3")
    site.ask("n1")
    site.tend()
    assert site.refused == [("n1", "no spare node has 2 warm processes")]


def test_a_spare_whose_processes_are_not_ready_is_waited_for(site: Moving) -> None:
    waiting = site.pool.waiting.pop("n3")
    site.ask("n1")
    site.tend()
    assert (site.planned, site.refused) == ([], [])
    site.pool.waiting["n3"] = waiting
    site.tend()
    assert site.planned == [("n1", "n3")]


def test_a_spare_with_a_fault_takes_no_node_s_place(site: Moving) -> None:
    site.ask("n1")
    site.tend(Fault.of_kind(GPU_RAS_UNCORRECTABLE, 1.0, "gpu", "bad", node="n3"))
    assert site.refused == [("n1", "no spare node has 2 warm processes")]


def test_an_attempt_without_recovery_in_memory_refuses(tmp_path: Path) -> None:
    site = Moving(tmp_path, memory=False)
    site.ask("n1")
    site.tend()
    assert "no recovery in memory" in site.refused[0][1]


def test_a_fault_before_the_boundary_comes_first_and_the_move_is_tried_again(site: Moving) -> None:
    site.ask("n1")
    site.tend()
    assert site.lose(5)
    assert site.memory.moves.move is None
    site.recover(1)
    assert [event["ranks"] for event in site.recorded("recovered_in_memory")] == [[5]]
    site.tend()
    assert site.planned == [("n1", "n3")] * 2
    assert site.store.moves[-1].number == 2


def test_a_move_for_which_the_ranks_held_in_vain_is_answered(site: Moving) -> None:
    """Its number is that of the next generation: before there is one they do not hold again."""
    site.ask("n1")
    site.tend()
    site.reports({"event": "unmoved", "number": 1})
    site.tend()
    reason = "the ranks held for a move, and a copy of their state was not whole in time"
    assert site.refused == [("n1", reason)]
    site.ask("n1", "r2")
    site.tend()
    assert site.refused == [("n1", reason)] * 2
    assert site.lose(5)
    site.recover(1)
    site.ask("n1", "r3")
    site.tend()
    assert site.planned == [("n1", "n3")] * 2
    assert site.store.moves[-1].number == 2


def test_a_node_that_was_left_is_excluded_though_a_recovery_fails_right_after(site: Moving) -> None:
    site.ask("n1")
    site.tend()
    site.boundary(1)
    site.moved(1)
    site.memory.refuse([0], "a rank hangs")
    site.tend()
    assert [event["nodes"] for event in site.recorded("nodes_excluded")] == ["n1"]
    assert site.refused == [], "it was answered already"


def test_a_fault_while_they_regroup_makes_a_generation_with_both(site: Moving) -> None:
    site.add_node("n4")
    site.ask("n1")
    site.tend()
    site.boundary(1)
    assert site.lose(6)
    (generation,) = site.store.generations
    assert (generation.number, generation.lost, generation.left) == (2, (2, 3, 6), ("n1",)), "all three are gone"


def test_a_fault_of_a_buddy_while_they_regroup_goes_down_a_rung(site: Moving) -> None:
    """The process that rank 2 was has left, and with it the memory from which rank 0 could come back."""
    site.ask("n1")
    site.tend()
    site.boundary(1)
    assert not site.lose(0)
    reason = site.recorded("recovery_failed")[0]["reason"]
    assert reason == "rank 0 is lost together with rank 2, which kept the copy of its state"


def test_a_fault_at_the_same_moment_as_the_boundary_makes_a_generation_with_both(site: Moving) -> None:
    """The server has published the move when the supervisor's own generation comes: it is refused."""
    site.add_node("n4")
    site.ask("n1")
    site.tend()
    assert site.lose(6)
    assert [(generation.number, generation.lost) for generation in site.store.generations] == [(1, (6,))]
    site.reports(
        {"event": "boundary", "number": 1, "step": 6}, {"event": "refused", "number": 1, "reason": "not after 1"}
    )
    assert site.memory.consider([6], [], [], 6)
    assert site.recorded("recovery_failed") == []
    assert (site.store.generations[-1].number, site.store.generations[-1].lost) == (2, (2, 3, 6))
    site.recover(2)
    assert [event["ranks"] for event in site.recorded("recovered_in_memory")] == [[6]]
    assert [event["off"] for event in site.recorded("ranks_moved")] == ["n1"]


def test_ranks_that_do_not_come_back_from_a_move_go_down_a_rung(site: Moving) -> None:
    site.ask("n[1,2]")
    site.tend()
    site.boundary(1)
    site.reports({"event": "failed", "number": 1, "rank": 0, "reason": "no whole step"})
    assert site.recorded("recovery_failed")[0]["reason"] == "no whole step"
    site.tend()
    site.tend()
    assert [off for off, _ in site.refused] == ["n1", "n2"]


def _slow(node: str) -> Fault:
    return Fault.of_kind(STRAGGLER, 1.0, "progress", f"rank on {node} is slow", node=node, rank=3, role="root")


def test_a_slow_node_is_left_as_planned_and_the_attempt_is_not_ended_for_it(site: Moving) -> None:
    assert site.moves.nodes == set()
    site.tend(_slow("n1"))
    assert site.planned == [("n1", "n3")]
    assert site.moves.nodes == {"n1"}


def test_the_policy_moves_nothing_where_that_is_off_and_asks_once(tmp_path: Path) -> None:
    drained = Fault.of_kind(NODE_DRAINED, 1.0, "slurm", "Slurm drains n1", node="n1")
    off = Moving(tmp_path, planned_moves=False)
    off.tend(drained)
    assert off.planned == []
    site = Moving(tmp_path)
    site.memory.places.spares = ()
    site.pool.waiting.pop("n3")
    site.tend(drained)
    site.tend(drained)
    assert site.refused == [("n1", "no spare node has 2 warm processes")]


def drained_nodes(names: Sequence[str]) -> list[Any]:
    return [
        SimpleNamespace(name=name, reason="fan", flags=frozenset({"drain"} if name in names else ()))
        for name in ("n0", "n1", "n2", "n3")
    ]


def test_a_node_that_slurm_drains_is_a_fault_and_no_spare(tmp_path: Path) -> None:
    site = Moving(tmp_path)
    site.job.on_slurm = True  # type: ignore[misc]
    moves = PlannedMoves(site.job, 1, site.memory, lambda: drained_nodes(["n1"]))
    found = wait_for(lambda: moves.tend([]), "the answer of Slurm")
    moves.close()
    assert [(fault.kind, fault.node, fault.line) for fault in found] == [
        ("node_drained", "n1", "Slurm drains n1: fan")
    ]
    assert moves.tend([]) == [], "reported once"
    assert site.planned == [("n1", "n3")]


def test_a_rank_that_waits_for_a_process_is_not_forgotten_where_the_boundary_is_reached_meanwhile(
    site: Moving,
) -> None:
    site.add_node("n5")  # no neighbour of n1: neither keeps copies of the other
    site.pool.take(["n5/w8"])
    site.ask("n1")
    site.tend()
    assert site.lose(6), "a process is started for it"
    site.boundary(1)
    assert site.lose(6)
    assert site.store.generations == [], "it is not there yet"
    site.reports({"event": "warm", "member": "n5/w9"})
    assert site.lose(6)
    (generation,) = site.store.generations
    assert (generation.number, generation.lost) == (2, (2, 3, 6))
    assert generation.members == ("n0/0", "n0/1", "n3/w4", "n3/w5", "n2/0", "n2/1", "n5/w9", "n5/1")
