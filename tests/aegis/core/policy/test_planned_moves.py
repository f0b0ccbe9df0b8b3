"""Which nodes the ranks should leave before anything breaks, and who continues in their place."""

from __future__ import annotations

from dataclasses import replace

import pytest

from zslurm.aegis.core.policy.in_memory import Ranks, plan_move
from zslurm.aegis.core.policy.planned_moves import HOT_S, RISING, nodes_to_leave
from zslurm.aegis.fault_kinds import GPU_RAS_CORRECTABLE, GPU_THROTTLED, NODE_DRAINED, STRAGGLER, FaultKind
from zslurm.aegis.types import Fault

NODES = ("n0", "n1", "n2")


def _fault(kind: FaultKind, node: str = "n1", *, line: str = "it happened", **more: object) -> Fault:
    return replace(Fault.of_kind(kind, 1.0, "sensor", line, node=node), **more)  # type: ignore[arg-type]


def _leave(*faults: Fault) -> list[str]:
    return [leave.node for leave in nodes_to_leave(faults, NODES, 2.0)]


def test_a_drained_node_is_left_unless_it_is_drained_no_more() -> None:
    drained = _fault(NODE_DRAINED, line="Slurm drains n1: fan")
    assert [leave.reason for leave in nodes_to_leave([drained], NODES, 2.0)] == ["Slurm drains n1: fan"]
    assert _leave(drained, _fault(NODE_DRAINED, cleared=True)) == []
    assert _leave(drained, _fault(NODE_DRAINED, cleared=True), drained) == ["n1"]


def test_corrected_memory_errors_are_a_reason_where_they_rise_on_one_gpu() -> None:
    counts = [_fault(GPU_RAS_CORRECTABLE, gpu="3", line=f"{10**power} errors") for power in range(RISING)]
    assert _leave(*counts[:-1]) == []
    assert _leave(*counts) == ["n1"]
    assert "3 reports so far; the last: 100 errors" in nodes_to_leave(counts, NODES, 2.0)[0].reason
    other = [*counts[:-1], _fault(GPU_RAS_CORRECTABLE, gpu="4", line="1 error")]
    assert _leave(*other) == [], "of another GPU"


def test_a_straggler_is_a_reason_where_the_run_is_to_act_on_it() -> None:
    assert _leave(_fault(STRAGGLER, rank=1, role="advisory")) == []
    assert _leave(_fault(STRAGGLER, rank=1, role="root")) == ["n1"]
    assert _leave(_fault(STRAGGLER, rank=1, role="root"), _fault(STRAGGLER, rank=1, cleared=True)) == []


@pytest.mark.parametrize(
    ("line", "lasted_s", "is_left"),
    [
        ("is slowed down: memory too hot", HOT_S, True),
        ("is slowed down: memory too hot", HOT_S - 1, False),
        ("is slowed down: throttled", 10 * HOT_S, False),
    ],
)
def test_a_gpu_that_stays_too_hot_is_a_reason(line: str, lasted_s: float, is_left: bool) -> None:
    hot = _fault(GPU_THROTTLED, gpu="3", line=line)
    assert bool(nodes_to_leave([hot], NODES, hot.time + lasted_s)) is is_left
    cooled = _fault(GPU_THROTTLED, gpu="3", cleared=True)
    assert nodes_to_leave([hot, cooled], NODES, hot.time + lasted_s) == []


def test_other_signs_and_other_nodes_are_none() -> None:
    assert _leave(_fault(GPU_THROTTLED, gpu="1"), _fault(NODE_DRAINED, "n9")) == []


def test_nodes_come_in_the_order_of_their_first_sign() -> None:
    assert _leave(_fault(NODE_DRAINED, "n2"), _fault(NODE_DRAINED, "n0"), _fault(NODE_DRAINED, "n2")) == [
        "n2",
        "n0",
    ]


WARM = {"n0": ["n0/w1"], "n1": ["n1/w2"], "n3": ["n3/w3"], "n4": ["n4/w4", "n4/w5"]}
RANKS = Ranks(("n0/0", "n0/1", "n1/0", "n1/1"), ("n0", "n0", "n1", "n1"), 2, frozenset(), warm=WARM)


def test_the_ranks_of_a_node_move_to_a_spare_with_enough_warm_processes() -> None:
    plan = plan_move(RANKS, "n0")
    assert plan.members == ("n4/w4", "n4/w5", "n1/0", "n1/1")
    assert plan.nodes == ("n4", "n4", "n1", "n1")


@pytest.mark.parametrize(
    ("ranks", "off", "unfit", "reason"),
    [
        (RANKS, "n4", (), "no rank is on n4"),
        (RANKS, "n0", ("n4",), "no spare node has 2 warm processes"),
        (replace(RANKS, dead=frozenset({"n4"})), "n0", (), "no spare node has 2 warm processes"),
        (
            replace(RANKS, warm={"n0": ["n0/w1"], "n4": ["n4/w4"]}, coming={"n4": 1}),
            "n0",
            (),
            "no spare node has 2 warm processes",
        ),
        (replace(RANKS, warm={}, coming={"n4": 2}), "n0", (), "no spare node has 2 warm processes"),
        (replace(RANKS, nodes=("n0",) * 4), "n0", (), "every rank is on n0, so no other node keeps their state"),
    ],
)
def test_what_is_not_possible_has_a_reason(ranks: Ranks, off: str, unfit: tuple[str, ...], reason: str) -> None:
    assert plan_move(ranks, off, unfit=unfit).reason == reason
