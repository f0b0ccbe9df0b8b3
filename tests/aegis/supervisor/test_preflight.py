"""What is done about incomplete rails: a pure decision, as a table."""

from __future__ import annotations

import pytest

from zslurm.aegis.supervisor.preflight import Decision, decide, faults
from zslurm.cluster.rails.types import Problem, RailMap

EIGHT = [f"node{index}" for index in range(8)]


def faulty(*nodes: str) -> dict[str, RailMap]:
    down = Problem("nic-down", "rail 6: ionic_6 is DOWN (Disabled)", 6, "ionic_6")
    slow = Problem("slow", "rail 1: ionic_1 runs at 200 Gb/s, others at 400", 1, "ionic_1")
    return {node: RailMap(node, "profile", (), problems=(down, slow)) for node in nodes}


def test_whole_rails_start_under_every_policy() -> None:
    for policy in ("exclude", "refuse", "warn"):
        assert decide(policy, {}, needed=4) == Decision("start")


def test_the_reason_names_node_and_nic() -> None:
    assert faults(faulty("node3")) == "node3: rail 6: ionic_6 is DOWN (Disabled)"
    assert faults(faulty("node3", "node5", "node6")) == (
        "node3: rail 6: ionic_6 is DOWN (Disabled) (and faults on node[5-6])"
    )


@pytest.mark.parametrize(("policy", "action"), [("exclude", "exclude"), ("refuse", "refuse"), ("warn", "start")])
def test_the_policy_decides(policy: str, action: str) -> None:
    decision = decide(policy, faulty("node3"), needed=4, usable=EIGHT)  # type: ignore[arg-type]
    assert decision.action == action
    assert (decision.node, decision.nodes) == ("node3", ("node3",))
    assert decision.reason == "node3: rail 6: ionic_6 is DOWN (Disabled)"


def test_all_faulty_nodes_go_at_once() -> None:
    assert decide("exclude", faulty("node3", "node5"), needed=6, usable=EIGHT).nodes == ("node3", "node5")


@pytest.mark.parametrize(
    ("needed", "usable", "demanded", "before", "why"),
    [
        (8, EIGHT, (), (), "; without it 7 usable nodes are left, and the run needs 8"),
        (1, (), (), (), "; without it 0 usable nodes are left, and the run needs 1"),
        (4, EIGHT, ("node3",), (), "; slurm.nodelist demands node3, so it cannot be excluded"),
        (4, EIGHT, (), ("node3", "node9"), "; node3 was excluded before and is in the job again"),
    ],
)
def test_where_excluding_would_not_help_it_stops_and_says_why(
    needed: int, usable: list[str], demanded: tuple[str, ...], before: tuple[str, ...], why: str
) -> None:
    decision = decide(
        "exclude", faulty("node3"), needed=needed, usable=usable, demanded=demanded, excluded_before=before
    )
    assert decision.action == "refuse"
    assert decision.reason == f"node3: rail 6: ionic_6 is DOWN (Disabled){why}"


def test_exclusion_ends_however_many_nodes_are_bad() -> None:
    """Every start finds the next bad node: after some exclusions too few are left, and it stops."""
    excluded: set[str] = set()
    for node in EIGHT:
        usable = set(EIGHT) - excluded
        if decide("exclude", faulty(node), needed=5, usable=usable, excluded_before=excluded).action == "refuse":
            break
        excluded.add(node)
    assert excluded == {"node0", "node1", "node2"}
