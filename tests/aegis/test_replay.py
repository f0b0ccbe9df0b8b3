"""What another policy would have done, from the events of a run."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest

from tests.aegis.attempts import NODES, NOW, SETTINGS, settings
from tests.aegis.recorded import Recorder, there
from zslurm.aegis.replay import Replayed, replay, resources_in
from zslurm.aegis.types import AttemptSummary, Resources, WorkLeft


def only(recorder: Recorder, **says: Any) -> Replayed:
    (one,) = replay(recorder.rows, settings(**says))
    return one


def test_the_same_policy_decides_the_same() -> None:
    recorder = Recorder().failed("rank_killed", there=there())
    recorder.failed("gpu_bad_pages", "swap", exclude=["node1"], there=there(NODES))
    assert [(one.policy.action, one.differs) for one in replay(recorder.rows, SETTINGS)] == [
        ("restart", False),
        ("swap", False),
    ]


def test_another_budget() -> None:
    recorder = Recorder()
    for _ in range(3):
        recorder.failed("user_error", there=there())
    replayed = replay(recorder.rows, settings(retries=1))
    assert [(one.policy.action, one.differs) for one in replayed] == [
        ("restart", False),
        ("stop", True),
        ("stop", True),
    ]


def test_other_nodes_excluded_are_a_difference() -> None:
    recorder = Recorder().failed("gpu_bad_pages", "swap", exclude=["node2"], there=there(NODES))
    assert only(recorder).differs


def test_less_patience_ends_the_attempt_sooner() -> None:
    recorder = Recorder().started().noticed("nic_fault", source="log", scope="nic")
    recorder.clock += 40
    recorder.event("x").ended("completed").decided("finish", there=there(NODES))
    assert (only(recorder).gives_up_after, only(recorder).differs) == (None, False)
    hasty = only(recorder, tolerate_s=10)
    assert hasty.gives_up_after == pytest.approx(10, abs=0.01)
    assert (hasty.policy.action, hasty.differs) == ("restart", True)


def test_more_patience_lets_it_run() -> None:
    recorder = Recorder().started().noticed("nic_fault", source="log", scope="nic")
    recorder.clock += 60
    recorder.event("step_killed", attempt=1, reason="because", root={}).ended().decided("restart", there=there())
    assert not only(recorder).goes_on
    assert only(recorder, tolerate_s=600).goes_on
    assert only(recorder, tolerate_s=600).differs


def test_what_was_not_recorded_is_assumed_and_marked() -> None:
    one = only(Recorder().failed("node_dead", "requeue", exclude=["node1"]))
    assert one.assumed
    assert (one.policy.action, one.policy.exclude, one.differs) == ("requeue", ("node1",), False)
    assert not only(Recorder().failed("node_dead", "requeue", exclude=["node1"], there=there(NODES[:1]))).assumed


def test_an_attempt_about_which_nothing_was_decided() -> None:
    one = only(Recorder().started().noticed("rank_killed").ended())
    assert (one.done, one.policy.action, one.differs) == (None, "restart", False)


def test_a_decision_that_was_only_observed() -> None:
    one = only(Recorder().failed("rank_killed", mode="observe", there=there()))
    assert one.done is not None
    assert (one.done.mode, one.differs) == ("observe", False)


def test_the_signal_that_asked_the_run_to_stop() -> None:
    recorder = Recorder().started().event("signal", attempt=1, signal="SIGUSR2").ended("interrupted")
    assert only(recorder.decided("requeue", there=there())).policy.action == "requeue"
    assert only(recorder, requeue_at_time_limit=False).policy.action == "finish"


def test_an_attempt_that_still_runs_is_not_assessed() -> None:
    assert replay(Recorder().started().noticed("gpu_bad_pages").rows, SETTINGS) == []


def test_what_there_was_comes_back_from_json() -> None:
    one = Resources(("a",), ("a", "b"), 2, demanded=frozenset({"b"}), elsewhere=3, asked=4)
    slices = {"a": ("leaf0/0",), "b": ("leaf1/1",)}
    for each in (one, replace(one, slices=slices), replace(one, work=WorkLeft(6, 2, 8, job_s=60, training_s=1.5))):
        assert resources_in(json.loads(json.dumps(each.fields()))) == each


@pytest.mark.parametrize(
    "damage", [{"nodes": 3}, {"nodes": [3]}, {"needed": "3"}, {"elsewhere": "?"}, {"in_use": None}]
)
def test_damaged_resources_are_none(damage: dict[str, Any]) -> None:
    recorder = Recorder().failed("rank_killed", there=there())
    recorder.rows[-1]["resources"] |= damage
    assert only(recorder).assumed


def test_the_attempt_state_that_was_recorded_counts() -> None:
    def replayed(**more: Any) -> Replayed:
        recorder = Recorder().started().noticed("nic_fault", source="log").noticed("rank_killed", "node2").ended()
        now = AttemptSummary(recorder.clock, 1, "failed", (), 40, **more)
        recorded = json.loads(json.dumps(now.fields()))
        return only(recorder.decided("restart", there=there(), attempt_state=recorded))

    went_on, stood_still = replayed(progressed_at=NOW + 30), replayed()
    assert went_on.policy.root is not None
    assert stood_still.policy.root is not None
    assert (went_on.policy.root.kind, stood_still.policy.root.kind) == ("rank_killed", "nic_fault")
    assert replayed(requeued=True).policy.action == "finish"
    assert replayed(asked_to_stop="SIGTERM").policy.action == "finish"
