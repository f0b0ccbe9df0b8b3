"""A fault of a node that is alive: its ranks go, and the others continue in their processes."""

from __future__ import annotations

import pytest

from tests.aegis.core.sites import Site
from zslurm.aegis.core.adopted_memory import found_memory
from zslurm.aegis.core.messages import EndRanks, FaultsFound, GiveUp, Regroup, StopChanged, StopState
from zslurm.aegis.fault_kinds import (
    GPU_BAD_PAGES,
    GPU_HANG_RESET,
    GPU_MEMORY_FAULT,
    GPU_RAS_UNCORRECTABLE,
    NIC_LINK_DOWN,
    RANK_HANG,
    RANK_KILLED,
    USER_ERROR,
    XGMI_ERROR,
    FaultKind,
)
from zslurm.aegis.types import Fault
from zslurm.run.events.event import Row, from_row

OF_GPU = (GPU_RAS_UNCORRECTABLE, GPU_BAD_PAGES, GPU_HANG_RESET, XGMI_ERROR)


@pytest.fixture
def site() -> Site:
    return Site()


def break_node(site: Site, node: str, kind: FaultKind = GPU_RAS_UNCORRECTABLE, *, step: int = 5) -> None:
    fault = Fault.of_kind(kind, site.now, "kernel_log", "it happened", node=node)
    site.tell(FaultsFound((fault,)))
    site.tick(step)


def given_up(site: Site) -> list[GiveUp]:
    return [action for action in site.actions if isinstance(action, GiveUp)]


@pytest.mark.parametrize("kind", OF_GPU)
def test_only_the_ranks_of_the_node_go(site: Site, kind: FaultKind) -> None:
    break_node(site, "n1", kind)
    (generation,) = site.generations
    assert generation.members == ("n0/0", "n0/1", "n3/w4", "n3/w5", "n2/0", "n2/1")
    assert (generation.lost, generation.left) == ((2, 3), ("n1",))
    site.recover(1)
    (expelled,) = site.recorded("ranks_expelled")
    assert (expelled["ranks"], expelled["nodes"]) == ([2, 3], ["n1"])
    (recovered,) = site.recorded("recovered_in_memory")
    assert (recovered["ranks"], recovered["rolled_back"]) == ([2, 3], 1)
    (excluded,) = site.recorded("nodes_excluded")
    assert excluded["nodes"] == ("n1",) and excluded["reason"].endswith("its ranks continue on a spare")
    assert site.state.rank_nodes == ["n0", "n0", "n3", "n3", "n2", "n2"]
    assert given_up(site) == [] and not site.memory.active


def test_what_is_left_of_its_ranks_is_killed_after_the_others_were_told(site: Site) -> None:
    """A rank may be inside a device call that nothing interrupts: the others must not wait for that."""
    break_node(site, "n1")
    kinds = [type(action) for action in site.actions]
    assert kinds.index(Regroup) < kinds.index(EndRanks)
    assert [action.ranks for action in site.actions if isinstance(action, EndRanks)] == [((2, "n1"), (3, "n1"))]


def test_without_a_spare_the_others_continue_on_fewer_nodes(site: Site) -> None:
    site.memory.take_warm(["n3/w4", "n3/w5"])
    site.fewer = {2: ""}
    break_node(site, "n1")
    site.recover(1)
    (recovered,) = site.recorded("recovered_in_memory")
    assert (recovered["ranks"], recovered["world_size"], recovered["nodes"]) == ([2, 3], 4, "n[0,2]")
    assert site.recorded("nodes_excluded")[0]["nodes"] == ("n1",)


def test_without_a_spare_and_fewer_nodes_the_attempt_ends_as_before(site: Site) -> None:
    site.memory.take_warm(["n3/w4", "n3/w5"])
    break_node(site, "n1")
    (failed,) = site.recorded("recovery_failed")
    assert failed["reason"].startswith("no spare node has 2 warm processes, and fewer nodes are not used")
    assert len(given_up(site)) > 0 and site.recorded("ranks_expelled") == []


def test_a_rank_that_the_fault_ended_makes_its_whole_node_go(site: Site) -> None:
    faults = (
        Fault.of_kind(RANK_KILLED, site.now + 1, "srun", "Killed", node="n1", rank=2),
        Fault.of_kind(GPU_HANG_RESET, site.now, "kernel_log", "GPU reset begin", node="n1"),
    )
    site.state.lost = {2}
    site.tell(FaultsFound(faults))
    site.tick()
    assert site.generations[-1].members == ("n0/0", "n0/1", "n3/w4", "n3/w5", "n2/0", "n2/1")
    assert [action.ranks for action in site.actions if isinstance(action, EndRanks)] == [((3, "n1"),)]


def test_a_fault_that_is_noticed_while_the_ranks_regroup_makes_a_further_generation(site: Site) -> None:
    assert site.lose(2)
    assert site.generations[-1].members[2] == "n1/w2", "a process of the same node takes its place"
    break_node(site, "n1")
    assert site.generations[-1].members == ("n0/0", "n0/1", "n3/w4", "n3/w5", "n2/0", "n2/1")
    site.recover(2)
    assert site.state.rank_nodes == ["n0", "n0", "n3", "n3", "n2", "n2"]


def test_a_fault_that_explains_no_lost_rank_makes_its_node_go_afterwards(site: Site) -> None:
    assert site.lose(2)
    break_node(site, "n1", GPU_HANG_RESET)
    assert len(site.generations) == 1, "it was noticed after the rank was killed"
    site.recover(1)
    site.tick()
    assert site.generations[-1].left == ("n1",)


def test_two_nodes_that_are_each_other_s_buddies_restart_the_ranks(site: Site) -> None:
    faults = [Fault.of_kind(GPU_BAD_PAGES, site.now, "gpu", "it happened", node=node) for node in ("n1", "n2")]
    site.tell(FaultsFound(tuple(faults)))
    site.tick()
    assert "which kept the copy of its state" in site.recorded("recovery_failed")[0]["reason"]
    assert len(given_up(site)) > 0


def test_no_more_nodes_are_left_than_may_be_excluded() -> None:
    site = Site(max_excluded=0)
    break_node(site, "n1")
    assert site.generations == [] and len(given_up(site)) > 0


def test_a_link_that_is_down_is_tolerated_before_its_node_is_left() -> None:
    site = Site(tolerate_s=60)
    break_node(site, "n1", NIC_LINK_DOWN)
    assert site.generations == []
    site.now += 61
    site.tick()
    assert site.generations[-1].left == ("n1",)


@pytest.mark.parametrize("kind", [GPU_MEMORY_FAULT, USER_ERROR, RANK_HANG])
def test_a_fault_that_speaks_against_no_node_leaves_none(site: Site, kind: FaultKind) -> None:
    site.state.lost = {2}
    break_node(site, "n1", kind)
    assert site.recorded("ranks_expelled") == [] and site.generations == []


def test_nothing_is_begun_once_the_ranks_were_asked_to_stop(site: Site) -> None:
    site.tell(StopChanged(StopState(asked=True, name="SIGUSR2")))
    break_node(site, "n1")
    assert site.generations == []


def test_further_reports_of_the_node_that_was_left_end_nothing(site: Site) -> None:
    break_node(site, "n1")
    site.recover(1)
    break_node(site, "n1", GPU_BAD_PAGES, step=9)
    assert len(site.generations) == 1 and given_up(site) == []
    assert site.lose(4, step=9), "a rank of another node can be lost"
    assert site.generations[-1].left == ("n1",)


def adopted(site: Site, *, is_recorded: bool) -> dict[str, object]:
    """What another supervisor finds, before or after the recovery was recorded."""
    rows: list[Row] = [
        {"event": name, "time": float(at), **fields}
        for at, (name, fields) in enumerate(site.events)
        if is_recorded or name != "recovered_in_memory"
    ]
    generation = site.generations[-1]
    shown = {"number": generation.number, "members": list(generation.members), "lost": list(generation.lost)}
    report = {"newest": shown | {"left": list(generation.left)}, "warm": []}
    first = [f"n{rank // 2}/{rank % 2}" for rank in range(6)]
    found = found_memory(report, first, [from_row(row) for row in rows])
    memory = found.state(2, ("n0", "n1", "n2"), {}, (), 5)
    return {"expelled": memory.expelled, "left": memory.left, "spares": memory.spares, "told": memory.told}


def test_the_next_supervisor_knows_which_nodes_were_left_and_why(site: Site) -> None:
    break_node(site, "n1")
    before = adopted(site, is_recorded=False)
    assert before["expelled"] == {"n1": "uncorrectable memory error of a GPU"} and before["left"] == set()
    site.recover(1)
    after = adopted(site, is_recorded=True)
    assert (after["expelled"], after["left"], after["spares"]) == ({}, {"n1"}, ())
    assert before["told"] == after["told"] == {"n1"}
