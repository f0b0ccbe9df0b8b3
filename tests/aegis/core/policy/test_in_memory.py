"""Which lost ranks are replaced in memory, by whom, and why others are not."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest

from zslurm.aegis.core.policy.in_memory import Ranks, plan_in_memory
from zslurm.aegis.fault_kinds import FAULT_RULES, GPU_RAS_UNCORRECTABLE, FaultKind
from zslurm.aegis.types import Fault

NODES = ("n0", "n0", "n1", "n1", "n2", "n2")
NO_SPARE = "no spare node has 2 warm processes, and fewer nodes are not used: aegis.min_nodes is not set"
WARM = {"n0": ["n0/w1"], "n1": ["n1/w2"], "n2": ["n2/w3"], "n3": ["n3/w4", "n3/w5"]}


def _ranks(*lost: int, **more: object) -> Ranks:
    members = tuple(f"{node}/{rank % 2}" for rank, node in enumerate(NODES))
    return replace(Ranks(members, NODES, 2, frozenset(lost), warm=WARM, step=7), **more)  # type: ignore[arg-type]


def _faults(*kinds: str) -> list[Fault]:
    return [Fault.of_kind(FaultKind(kind), 1.0, "srun", "it happened") for kind in kinds]


def _reason(ranks: Ranks, kinds: Sequence[str] = ("rank_killed",)) -> str:
    plan = plan_in_memory(ranks, _faults(*kinds), most_tries=3)
    assert plan.possible == (not plan.reason)
    return plan.reason


def test_a_killed_rank_is_replaced_on_its_node() -> None:
    plan = plan_in_memory(_ranks(2), _faults("rank_killed"), most_tries=3)
    assert plan.members == ("n0/0", "n0/1", "n1/w2", "n1/1", "n2/0", "n2/1")
    assert plan.nodes == NODES


def test_rank_0_is_a_rank_like_any_other() -> None:
    assert plan_in_memory(_ranks(0), _faults("rank_killed"), most_tries=3).members[0] == "n0/w1"


def test_the_ranks_of_a_dead_node_move_to_a_spare_together() -> None:
    dead = _ranks(2, 3, dead=frozenset({"n1"}))
    plan = plan_in_memory(dead, _faults("node_dead"), most_tries=3)
    assert plan.members == ("n0/0", "n0/1", "n3/w4", "n3/w5", "n2/0", "n2/1")
    assert plan.nodes == ("n0", "n0", "n3", "n3", "n2", "n2")


def test_a_killed_rank_and_a_dead_node_at_once() -> None:
    """Ranks 4 and 5 are lost with n2; rank 1 is not the keeper of either's copy: that are 0 and 1."""
    both = _ranks(4, 5, 2, dead=frozenset({"n2"}))
    assert _reason(both, ("node_dead", "rank_killed")) == (
        "rank 2 is lost together with rank 4, which kept the copy of its state"
    )


@pytest.mark.parametrize(
    ("ranks", "reason"),
    [
        (_ranks(2, 3, dead=frozenset({"n1"}), warm={"n3": ["n3/w4"]}), NO_SPARE),
        (_ranks(2, 3, dead=frozenset({"n1"}), warm={"n1": ["a", "b"]}), NO_SPARE),
        (_ranks(0, 2), "rank 0 is lost together with rank 2, which kept the copy of its state"),
        (_ranks(5, 1), "rank 5 is lost together with rank 1, which kept the copy of its state"),
        (_ranks(*range(6)), "no rank survived"),
        (_ranks(2, step=-1), "no step was finished yet, so there is no copy to go back to"),
        (_ranks(2, tries=3), "3 recoveries in memory led to no new step"),
    ],
)
def test_what_goes_down_a_rung(ranks: Ranks, reason: str) -> None:
    assert _reason(ranks) == reason


def test_without_a_spare_the_ranks_of_the_other_nodes_move_up_where_fewer_nodes_may_be_used() -> None:
    dead = _ranks(2, 3, dead=frozenset({"n1"}), warm={"n0": ["n0/w1"]})
    asked: list[int] = []

    def may(nodes: int) -> str:
        asked.append(nodes)
        return ""

    plan = plan_in_memory(dead, _faults("node_dead"), most_tries=3, why_not_fewer=may)
    assert asked == [2]
    assert plan.members == ("n0/0", "n0/1", "n2/0", "n2/1")
    assert plan.nodes == ("n0", "n0", "n2", "n2")
    assert plan.former == (0, 1, 4, 5)


def test_a_dead_node_without_a_spare_and_a_killed_rank_go_down_a_rung() -> None:
    """The process that would take the killed rank's place knows nothing of the number of ranks before."""
    both = replace(
        _ranks(2, 7, dead=frozenset({"n1"}), warm={"n3": ["n3/w1"]}),
        members=tuple(f"n{node}/0" for node in range(8)),
        nodes=tuple(f"n{node}" for node in range(8)),
        per_node=1,
        dead=frozenset({"n2"}),
        warm={"n7": ["n7/w1"]},
    )
    plan = plan_in_memory(both, _faults("node_dead", "rank_killed"), most_tries=3, why_not_fewer=lambda _: "")
    assert plan.reason == "ranks were lost on several nodes, and not all of them can be replaced"


@pytest.mark.parametrize(
    ("ranks", "start"),
    [
        (_ranks(2, 3), {"n1": 1}),
        (_ranks(2, 3, coming={"n1": 1}), {}),
        (_ranks(2, warm={}), {"n1": 1}),
        (_ranks(0, 3, warm={"n0": ["n0/w1"]}, coming={"n0": 1, "n1": 1}), {}),
        (_ranks(2, 3, dead=frozenset({"n1"}), warm={"n3": ["n3/w4"]}, coming={"n3": 1}), {}),
    ],
)
def test_the_ranks_wait_where_processes_are_missing(ranks: Ranks, start: dict[str, int]) -> None:
    plan = plan_in_memory(ranks, _faults("rank_killed"), most_tries=3)
    assert (plan.possible, plan.reason, plan.waits, plan.start) == (False, "", True, start)


@pytest.mark.parametrize("kind", [kind for kind, rule in FAULT_RULES.items() if rule.role == "root"], ids=str)
def test_every_kind_of_fault(kind: FaultKind) -> None:
    survivable = {"rank_killed", "rank_exit", "crash_segv", "host_oom", "node_dead", "slurm_node_fail"}
    assert (_reason(_ranks(2), (str(kind),)) == "") == (str(kind) in survivable)


def test_one_fault_that_cannot_be_survived_decides_for_all() -> None:
    assert _reason(_ranks(2), ("rank_killed", "rank_hang")) == (
        "a rank hangs: it may hang inside a device call, which nothing can interrupt"
    )
    assert "the device context is corrupt" in _reason(_ranks(2), ("gpu_memory_fault", "rank_killed"))


def test_consequences_and_advice_decide_nothing() -> None:
    assert _reason(_ranks(2), ("rank_killed", "peer_lost", "nic_errors", "memory_low")) == ""


def test_a_process_that_joins_stays_the_rank_that_it_was_to_be() -> None:
    """Rank 2 is lost while the ranks regroup with another process as rank 3: that one knows its rank already."""
    begun = ("n0/0", "n0/1", "n1/0", "n1/w2", "n2/0", "n2/1")
    both = _ranks(2, 3, warm=WARM | {"n1": ["n1/w2", "n1/w6"]}, planned=begun)
    plan = plan_in_memory(both, _faults("rank_killed"), most_tries=3)
    assert plan.members == ("n0/0", "n0/1", "n1/w6", "n1/w2", "n2/0", "n2/1")
    gone = replace(both, warm={"n1": ["n1/w6", "n1/w7"]})
    assert plan_in_memory(gone, _faults("rank_killed"), most_tries=3).members[2:4] == ("n1/w6", "n1/w7")


def test_a_spare_that_was_begun_with_stays_the_place_of_its_node() -> None:
    """n0 dies while the ranks of n2 move to the first spare, and one of the processes there has failed."""
    nodes = tuple(f"n{rank // 2}" for rank in range(8))
    ranks = replace(
        _ranks(0, 1, 4, 5, dead=frozenset({"n0", "n2"})),
        members=tuple(f"n{rank // 2}/{rank % 2}" for rank in range(8)),
        nodes=nodes,
        warm={"s1": ["s1/w5", "s1/w9"], "s2": ["s2/w6", "s2/w7"]},
        planned=("n0/0", "n0/1", "n1/0", "n1/1", "s1/w4", "s1/w5", "n3/0", "n3/1"),
    )
    plan = plan_in_memory(ranks, _faults("node_dead"), most_tries=3)
    assert plan.members == ("s2/w6", "s2/w7", "n1/0", "n1/1", "s1/w9", "s1/w5", "n3/0", "n3/1")


def test_what_happens_on_a_node_without_ranks_keeps_no_rank_from_being_replaced() -> None:
    killed = _faults("rank_killed")
    memory = Fault.of_kind(GPU_RAS_UNCORRECTABLE, 1.0, "sysfs", "an error", node="n9")
    assert plan_in_memory(_ranks(2), [*killed, memory], most_tries=3).possible
    here = replace(memory, node="n1")
    assert not plan_in_memory(_ranks(2), [*killed, here], most_tries=3).possible
