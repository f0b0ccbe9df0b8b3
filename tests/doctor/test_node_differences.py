"""Nodes that differ from the others, clocks that do not agree, and files that are not seen."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from zslurm.doctor.check import Check, CheckOutcome, NodeData, Status, all_checks, failed, merged, passed
from zslurm.doctor.node_differences import inconsistent_nodes, unlike_here
from zslurm.hardware.node_sources import NodeTask, Sources

VERSIONS = Check("versions", "system", "", "node", lambda sources: None)


def with_rocm(**versions: str | None) -> dict[str, CheckOutcome]:
    return {node: passed("", must_match={"ROCm": version, "kernel": "6.8"}) for node, version in versions.items()}


def named(name: str) -> Check:
    return next(check for check in all_checks() if check.name == name)


def test_these_three_differ_from_the_other_125() -> None:
    versions = {f"node{index:03}": "6.4.1" for index in range(125)} | {
        f"odd{index}": "6.3.0" for index in range(3)
    }
    found = inconsistent_nodes(VERSIONS, with_rocm(**versions))
    assert set(found) == {"odd0", "odd1", "odd2"}
    (outcome,) = found["odd0"]
    assert (outcome.status, outcome.node_fault) == (Status.FAIL, True)
    assert outcome.reason == "these 3 differ from the other 125: ROCm is 6.3.0, not 6.4.1"


def test_what_a_node_cannot_read_is_not_compared() -> None:
    assert inconsistent_nodes(VERSIONS, with_rocm(node0="6.4.1", node1=None, node2="6.4.1")) == {}


def test_where_no_value_is_usual_no_node_is_excluded() -> None:
    found = inconsistent_nodes(VERSIONS, with_rocm(node0="6.4.1", node1="6.4.1", node2="6.3.0", node3="6.3.0"))
    assert set(found) == {"node0", "node1", "node2", "node3"}
    (outcome,) = found["node3"]
    assert (outcome.status, outcome.node_fault) == (Status.FAIL, False)
    assert outcome.reason == "ROCm differs, and no value is usual: 6.4.1 on node[0-1]; 6.3.0 on node[2-3]"


def test_several_differences_of_the_same_nodes_are_one_line() -> None:
    rails = {f"rail {index}": f"GPU {index}" for index in range(8)}
    turned = {f"rail {index}": f"GPU {7 - index}" for index in range(8)}
    outcomes = {name: passed("", must_match=rails) for name in "abc"} | {"d": passed("", must_match=turned)}
    (outcome,) = inconsistent_nodes(VERSIONS, outcomes)["d"]
    assert outcome.reason == (
        "this one differs from the other 3: rail 0 is GPU 7, not GPU 0; rail 1 is GPU 6, not GPU 1; "
        "rail 2 is GPU 5, not GPU 2; and 5 more"
    )


def test_nodes_that_are_unlike_this_machine_are_not_blamed() -> None:
    here = passed("", must_match={"ROCm": None, "kernel": "6.9"})
    (outcome,) = unlike_here(VERSIONS, here, with_rocm(node0="6.4.1"))["node0"]
    assert (outcome.reason, outcome.node_fault) == ("kernel is 6.8, here 6.9", False)


def test_all_that_is_found_of_a_node_is_one_outcome() -> None:
    own = passed("fine", must_match={"kernel": "6.8"}, data={"x": 1})
    assert merged([own, passed("fine too")]) == passed("fine too", must_match=own.must_match, data=own.data)
    both = merged([own, CheckOutcome(Status.WARN, "odd", "look"), failed("bad", "mend")])
    assert (both.status, both.reason, both.remedy, both.must_match) == (
        Status.FAIL,
        "bad; odd",
        "mend; look",
        own.must_match,
    )
    undecided = CheckOutcome(Status.FAIL, "differs", "", node_fault=False)
    assert merged([own, undecided]).node_fault is False
    assert merged([failed("bad", ""), undecided]).node_fault is True


def clocks(**ahead: float) -> dict[str, CheckOutcome]:
    """Nodes whose clocks are ahead of this machine's; each took a second to start and answered in 10 ms."""
    nodes = {
        name: NodeData({}, sent=100.0, began=101.0 + by, ended=101.5 + by, received=101.51)
        for name, by in ahead.items()
    }
    compare = named("clock").compare
    assert compare is not None
    return dict(compare(nodes, Sources(NodeTask())))


def test_clocks_that_agree_pass_and_the_error_is_stated() -> None:
    found = clocks(node0=0.0, node1=0.02, node2=-0.3)
    assert {outcome.status for outcome in found.values()} == {Status.PASS}
    assert found["node0"].reason == "between -0.01 and +1.00 s ahead of here, +0.00 s from most nodes"


def test_a_clock_that_is_off_fails_whichever_way() -> None:
    found = clocks(node0=0.0, node1=5.0, node2=-30.0)
    assert [found[name].status for name in ("node0", "node1", "node2")] == [Status.PASS, Status.FAIL, Status.FAIL]
    assert "-30.00 s from most nodes" in found["node2"].reason


def test_a_clock_slightly_behind_all_others_is_found_by_comparing_nodes() -> None:
    found = clocks(a=0.0, b=0.0, c=0.0, d=-1.5)
    assert [name for name, outcome in found.items() if outcome.status is Status.FAIL] == ["d"]


def test_what_a_node_wrote_must_be_visible_here(tmp_path: Path) -> None:
    (tmp_path / "a.small").write_text("word")
    compare = named("shared-files").compare
    assert compare is not None
    nodes: dict[str, Any] = {name: NodeData({"file": f"{name}.small"}) for name in ("a", "b")}
    found = compare(nodes, Sources(NodeTask(probe=str(tmp_path), token="word", directory="/runs")))
    assert {name: outcome.status for name, outcome in found.items()} == {"b": Status.FAIL}


def test_nodes_whose_memory_is_held_by_something_are_found() -> None:
    rooms = {"node0": 1000 << 30, "node1": 980 << 30, "node2": 400 << 30}
    compare = named("page-cache").compare
    assert compare is not None
    found = compare({name: NodeData({"room": room}) for name, room in rooms.items()}, Sources(NodeTask()))
    assert {name: outcome.status for name, outcome in found.items()} == {"node2": Status.WARN}
    assert found["node2"].reason == "room for 400 GiB, half of the nodes have 980 GiB or more"
    assert compare({"node0": NodeData({"room": 1})}, Sources(NodeTask())) == {}
