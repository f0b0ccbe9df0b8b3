"""Planned moves: requests, faults, one node after the other, and what interrupts."""

from __future__ import annotations

from typing import Any

import pytest

from tests.aegis.core.sites import Site
from zslurm.aegis.core.attempt import MovesState
from zslurm.aegis.core.memory import give_up
from zslurm.aegis.core.messages import DrainsRead, MoveRequested, StoreReported
from zslurm.aegis.fault_kinds import GPU_RAS_UNCORRECTABLE, NODE_DRAINED, STRAGGLER
from zslurm.aegis.types import Fault


class Moving(Site):
    """A site whose run can be asked to move ranks."""

    def __init__(self, *, memory: bool = True, **aegis: Any) -> None:
        super().__init__(**aegis)
        if not memory:
            self.state.memory = None

    def ask(self, off: str, request: str = "r1") -> None:
        self.tell(MoveRequested(off, "asked for by ann", request, self.now))

    def tend(self, *faults: Fault) -> None:
        self.state.faults = list(faults)
        self.tick()

    def boundary(self, number: int, step: int = 6) -> None:
        self.reports({"event": "boundary", "number": number, "step": step})

    def moved(self, number: int, step: int = 6) -> None:
        report = {"event": "recovered", "number": number, "step": step, "rolled_back": 0}
        self.tell(StoreReported(report, self.now, self.now))

    @property
    def planned(self) -> list[tuple[str, str]]:
        return [(event["off"], event["to"]) for event in self.recorded("move_planned")]

    @property
    def refused(self) -> list[tuple[str, str]]:
        return [(event["off"], event["reason"]) for event in self.recorded("move_refused")]

    def add_node(self, node: str) -> None:
        """Let the ranks be on one more node."""
        self.memory.members += [f"{node}/0", f"{node}/1"]
        self.state.rank_nodes += [node, node]
        self.reports({"event": "warm", "member": f"{node}/w8"})


@pytest.fixture
def site() -> Moving:
    return Moving()


def test_a_request_moves_a_node_s_ranks_to_the_spare(site: Moving) -> None:
    site.ask("n1")
    site.tend()
    (generation,) = site.held
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
    assert site.replaced == ({2, 3}, set()), "and no node is dead"
    site.tend()
    (excluded,) = site.recorded("nodes_excluded")
    assert (excluded["nodes"], excluded["reason"]) == (("n1",), "the ranks moved off it: asked for by ann")
    site.reports({"event": "warm", "member": "n1/w8"})
    assert "n1" not in site.memory.waiting, "no process of the node is used any more"


def test_a_spare_is_checked_before_ranks_move_to_it(site: Moving) -> None:
    site.check_spares(n3="memory: 0.1 GB is left")
    site.memory.spares = ("n3", "n4")
    site.reports(*({"event": "warm", "member": name} for name in ("n4/w6", "n4/w7")))
    site.ask("n1")
    site.tend()
    site.tend()
    assert site.planned == [("n1", "n4")]
    assert site.checked == [{"n3"}, {"n4"}]
    assert [row["nodes"] for row in site.recorded("nodes_excluded")] == [("n3",)]


def test_a_move_without_a_fit_spare_is_refused(site: Moving) -> None:
    site.check_spares(n3="memory: 0.1 GB is left")
    site.ask("n1")
    site.tend()
    assert site.held == []
    assert site.refused == [("n1", "no spare node has 2 warm processes")]


def test_a_request_is_answered_once(site: Moving) -> None:
    site.ask("n9", "r2")
    site.tend()
    site.tend()
    assert site.refused == [("n9", "no rank is on n9 (ranks are on n[0-2])")]
    site.state.moves = MovesState(answered=frozenset({("r2", "n9")}))
    site.ask("n9", "r2")
    site.tend()
    assert len(site.refused) == 1, "the next supervisor does not answer it again"


def test_two_nodes_are_left_one_after_the_other(site: Moving) -> None:
    site.memory.spares = ("n3", "n4")
    site.reports(*({"event": "warm", "member": name} for name in ("n4/w6", "n4/w7")))
    site.ask("n0")
    site.ask("n1")
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
    site.memory.spares = ()
    site.memory.waiting.pop("n3")
    site.ask("n1")
    site.tend()
    assert site.refused == [("n1", "no spare node has 2 warm processes")]


def test_a_spare_whose_processes_are_not_ready_is_waited_for(site: Moving) -> None:
    waiting = site.memory.waiting.pop("n3")
    site.ask("n1")
    site.tend()
    assert (site.planned, site.refused) == ([], [])
    site.memory.waiting["n3"] = waiting
    site.tend()
    assert site.planned == [("n1", "n3")]


def test_a_spare_with_a_fault_takes_no_node_s_place(site: Moving) -> None:
    site.ask("n1")
    site.tend(Fault.of_kind(GPU_RAS_UNCORRECTABLE, 1.0, "gpu", "bad", node="n3"))
    assert site.refused == [("n1", "no spare node has 2 warm processes")]


def test_an_attempt_without_recovery_in_memory_refuses() -> None:
    site = Moving(memory=False)
    site.ask("n1")
    site.tend()
    assert "no recovery in memory" in site.refused[0][1]


def test_a_fault_before_the_boundary_comes_first_and_the_move_is_tried_again(site: Moving) -> None:
    site.ask("n1")
    site.tend()
    assert site.lose(5)
    assert site.memory.move is None
    site.recover(1)
    assert [event["ranks"] for event in site.recorded("recovered_in_memory")] == [[5]]
    site.tend()
    assert site.planned == [("n1", "n3")] * 2
    assert site.held[-1].number == 2


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
    assert site.held[-1].number == 2


def test_a_node_that_was_left_is_excluded_though_a_recovery_fails_right_after(site: Moving) -> None:
    site.ask("n1")
    site.tend()
    site.boundary(1)
    site.moved(1)
    give_up(site.state, "a rank hangs", [0])
    site.tend()
    assert [event["nodes"] for event in site.recorded("nodes_excluded")] == [("n1",)]
    assert site.refused == [], "it was answered already"


def test_a_fault_while_they_regroup_makes_a_generation_with_both(site: Moving) -> None:
    site.add_node("n4")
    site.ask("n1")
    site.tend()
    site.boundary(1)
    assert site.lose(6)
    (generation,) = site.generations
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
    assert [(generation.number, generation.lost) for generation in site.generations] == [(1, (6,))]
    site.reports(
        {"event": "boundary", "number": 1, "step": 6}, {"event": "refused", "number": 1, "reason": "not after 1"}
    )
    site.tick()
    assert site.recorded("recovery_failed") == []
    assert (site.generations[-1].number, site.generations[-1].lost) == (2, (2, 3, 6))
    site.recover(2)
    assert [event["ranks"] for event in site.recorded("recovered_in_memory")] == [[6]]
    assert [event["off"] for event in site.recorded("ranks_moved")] == ["n1"]


def test_ranks_that_do_not_come_back_from_a_move_go_down_a_rung(site: Moving) -> None:
    site.ask("n1")
    site.ask("n2")
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
    assert site.state.moves.nodes == set()
    site.tend(_slow("n1"))
    assert site.planned == [("n1", "n3")]
    assert site.state.moves.nodes == {"n1"}


def test_the_policy_moves_nothing_where_that_is_off_and_asks_once() -> None:
    drained = Fault.of_kind(NODE_DRAINED, 1.0, "slurm", "Slurm drains n1", node="n1")
    off = Moving(planned_moves=False)
    off.tend(drained)
    assert off.planned == []
    site = Moving()
    site.memory.spares = ()
    site.memory.waiting.pop("n3")
    site.tend(drained)
    site.tend(drained)
    assert site.refused == [("n1", "no spare node has 2 warm processes")]


def test_a_node_that_slurm_drains_is_a_fault_and_no_spare() -> None:
    site = Moving()
    site.memory.spares = ("n3", "n4")
    site.reports(*({"event": "warm", "member": name} for name in ("n4/w6", "n4/w7")))
    for _ in range(2):
        site.tell(DrainsRead({"n1": "fan", "n3": ""}, 1.0))
    assert [(fault["kind"], fault["node"], fault["line"]) for fault in site.recorded("fault_detected")] == [
        ("node_drained", "n1", "Slurm drains n1: fan")
    ], "reported once"
    site.tick()
    assert site.planned == [("n1", "n4")]
    site.tell(DrainsRead({}, 2.0))
    assert site.recorded("fault_detected")[-1]["line"] == "Slurm drains n1 no more"


def test_a_rank_that_waits_for_a_process_is_not_forgotten_where_the_boundary_is_reached_meanwhile(
    site: Moving,
) -> None:
    site.add_node("n5")  # no neighbour of n1: neither keeps copies of the other
    site.memory.take_warm(["n5/w8"])
    site.ask("n1")
    site.tend()
    assert site.lose(6), "a process is started for it"
    site.boundary(1)
    assert site.lose(6)
    assert site.generations == [], "it is not there yet"
    site.reports({"event": "warm", "member": "n5/w9"})
    assert site.lose(6)
    (generation,) = site.generations
    assert (generation.number, generation.lost) == (2, (2, 3, 6))
    assert generation.members == ("n0/0", "n0/1", "n3/w4", "n3/w5", "n2/0", "n2/1", "n5/w9", "n5/1")
