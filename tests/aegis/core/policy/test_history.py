"""What the policy remembers of a run, from the events of any supervisor, whole or not."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.aegis.attempts import NOW, fault, incident
from tests.aegis.recorded import Recorder
from zslurm.aegis.core.policy.history import (
    fault_in,
    history_of,
    roots_before,
    starts_since,
    without_progress,
)
from zslurm.aegis.types import Fault, History
from zslurm.run.events.event_text import node_names
from zslurm.run.exclusions import active_exclusions


def test_decisions_that_were_acted_on_are_the_incidents() -> None:
    recorder = Recorder().failed("rank_killed", step=20).failed("node_dead", "swap", exclude=["node1"], step=30)
    past = history_of(recorder.rows)
    assert [(i.attempt, i.action, i.committed_step, i.excluded) for i in past.incidents] == [
        (1, "restart", 20, ()),
        (2, "swap", 30, ("node1",)),
    ]
    assert [i.root.kind for i in past.incidents if i.root] == ["rank_killed", "node_dead"]
    assert set(past.exclusions) == {"node1"}
    assert len(past.starts) == 2


@pytest.mark.parametrize("mode", ["observe", "off"])
def test_a_decision_that_was_only_recorded_is_none(mode: str) -> None:
    assert history_of(Recorder().failed("node_dead", exclude=["node1"], mode=mode).rows).incidents == ()


def test_an_exclusion_is_known_from_its_event_as_well_as_from_the_decision() -> None:
    recorder = Recorder().failed("node_dead", "swap", exclude=["node1"])
    recorder.event("nodes_excluded", nodes="node[1,7]", reason="rails").event("nodes_excluded", nodes=["x"])
    past = history_of(recorder.rows)
    assert active_exclusions(past.exclusions, recorder.clock).keys() == {"node1", "node7", "x"}


def test_where_nothing_says_what_was_saved_it_is_no_more_than_before() -> None:
    recorder = Recorder().failed("rank_killed", step=None).failed("rank_killed", step=20)
    steps = [i.committed_step for i in history_of(recorder.failed("rank_killed", step=None).rows).incidents]
    assert steps == [-1, 20, 20]


@pytest.mark.parametrize(
    "row",
    [
        {},
        {"event": "decision"},
        {"event": "decision", "time": "soon", "action": "stop"},
        {"event": "decision", "time": 1.0, "action": "explode"},
        {"event": "nodes_excluded", "time": 1.0},
        {"event": "nodes_excluded", "time": 1.0, "nodes": "node[1-"},
        {"event": "nodes_excluded", "time": 1.0, "nodes": 7},
        {"event": "of_the_future", "time": 1.0, "nodes": ["a"]},
    ],
)
def test_rows_that_say_nothing_are_passed_over(row: dict[str, Any]) -> None:
    assert history_of([row]) == History()


@pytest.mark.parametrize(
    "damage",
    [
        {"kind": None},
        {"role": "villain"},
        {"scope": 3},
        {"time": "now"},
        {"rank": "5"},
        {"node": 1},
        {"line": None},
    ],
)
def test_a_damaged_fault_is_none(damage: dict[str, Any]) -> None:
    whole = fault("rank_killed", rank=5).fields()
    assert fault_in(whole) == fault("rank_killed", rank=5)
    assert fault_in(whole | damage) is None
    row = {"event": "decision", "time": 1.0, "action": "restart", "root": whole | damage}
    assert [i.root for i in history_of([row]).incidents] == [None]


@given(st.builds(
    Fault, kind=st.text(min_size=1), role=st.sampled_from(["root", "cascade", "benign"]),
    scope=st.sampled_from(["gpu", "nic", "unknown"]), time=st.floats(0, 2e9), source=st.text(), line=st.text(),
    node=st.none() | st.text(), rank=st.none() | st.integers(0, 4096), step=st.none() | st.integers(-1, 10**9),
    cleared=st.booleans(),
))  # fmt: skip
def test_a_fault_comes_back_as_it_was(one: Fault) -> None:
    assert fault_in(one.fields()) == one


def test_failures_without_progress_are_those_since_the_newest_checkpoint() -> None:
    roots = [fault("user_error", f"n{i}") for i in range(4)]
    past = History((
        incident(roots[0], step=10), incident(roots[1], step=20), incident(roots[2], step=20, excluded=("n2",)),
        incident(roots[3], step=20),
    ))  # fmt: skip
    assert [i.root for i in without_progress(past, 20)] == [roots[1], roots[3]]
    assert without_progress(past, 21) == []


def test_starts_count_from_the_last_end() -> None:
    past = History((incident(None, action="finish", ago=50.0),), starts=tuple(NOW - i * 20.0 for i in range(6)))
    assert starts_since(past, NOW - 3600) == 3
    assert starts_since(past, NOW - 10) == 1


def test_waits_are_from_a_requeue_to_the_next_start_of_the_same_job() -> None:
    recorder = Recorder().failed("node_dead", "requeue").event("requeued", excluded="node1")
    recorder.clock += 98.0
    recorder.started().failed("rank_killed").event("requeued").event("run_ended").started()
    assert history_of(recorder.rows).waits == (99.0, 2.0)
    recorder.event("requeued")
    recorder.rows[-1]["job_id"] = "16"
    assert history_of(recorder.started().rows).waits == (99.0, 2.0), "it was submitted again"


def test_roots_on_a_node() -> None:
    mine, other = fault("rank_killed"), fault("rank_killed", "node2")
    past = History((incident(mine), incident(other), incident(None), incident(mine, ago=500.0)))
    assert roots_before(past, "node1", NOW - 900) == [mine, mine]
    assert roots_before(past, "node1", NOW - 550) == [mine]
    assert roots_before(past, "node1", NOW - 500) == []


def test_nodes_of_an_event() -> None:
    assert node_names("n[1-2]") == node_names(["n1", "n2"]) == ["n1", "n2"]
    assert node_names("n[1-") == node_names(7) == []
