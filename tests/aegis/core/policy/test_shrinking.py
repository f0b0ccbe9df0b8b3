"""Fewer nodes or the queue: whichever is expected to cost less, with both numbers in the reason."""

from __future__ import annotations

from typing import Any, get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.aegis.attempts import fault, history, settings
from tests.aegis.core.policy.decisions import decided
from zslurm.aegis.core.policy.shrinking import (
    FIRST_WAIT_S,
    expected_helper_wait_s,
    expected_wait_s,
    weigh,
    why_not_fewer,
)
from zslurm.aegis.types import WorkLeft
from zslurm.config.aegis import Heal

HOUR = 3600.0
DAY = 24 * HOUR
FLAGSHIP = {"batch": 4096, "micro_batch": 4, "ranks_per_node": 8}


@pytest.mark.parametrize(
    ("work", "fewer", "all_nodes", "in_use", "ratio", "lost_h"),
    [
        # 5 sequences instead of 4, for a day: a fifth of it is lost.
        (FLAGSHIP | {"job_s": DAY}, 127, 128, 128, 1.25, 4.8),
        (FLAGSHIP | {"job_s": 3 * HOUR}, 127, 128, 128, 1.25, 0.6),
        # Nothing is known of the end: a day.
        (FLAGSHIP, 127, 128, 128, 1.25, 4.8),
        # The training is done before: an hour of it takes 1.25.
        (FLAGSHIP | {"job_s": DAY, "training_s": HOUR}, 127, 128, 128, 1.25, 0.25),
        # ... as it does on the 127 nodes that it has had since an earlier loss: no node more is lost.
        (FLAGSHIP | {"job_s": DAY, "training_s": 1.25 * HOUR}, 127, 128, 127, 1.25, 0.25),
        (FLAGSHIP | {"job_s": HOUR, "training_s": DAY}, 127, 128, 128, 1.25, 0.2),
        # The job is over its limit already.
        (FLAGSHIP | {"job_s": -5.0}, 127, 128, 128, 1.25, 0.0),
        # 120 nodes have 5 sequences a rank as 127 do; 64 have 8.
        (FLAGSHIP | {"job_s": DAY}, 120, 128, 128, 1.25, 4.8),
        (FLAGSHIP | {"job_s": DAY}, 64, 128, 128, 2.0, 12.0),
        # 16 nodes of 8: 32 sequences a rank, then 35.
        (FLAGSHIP | {"job_s": DAY}, 15, 16, 16, 35 / 32, 24 * 3 / 35),
        # Where ranks have a sequence more than they need, the loss of one costs nothing.
        ({"batch": 10, "micro_batch": 2, "ranks_per_node": 1}, 5, 6, 6, 1.0, 0.0),
        # Context groups of 8 in phase 3: 512 sequences on one group a node.
        ({"batch": 512, "micro_batch": 1, "ranks_per_node": 1, "job_s": DAY}, 127, 128, 128, 1.25, 4.8),
    ],
)
def test_what_fewer_nodes_cost(
    work: dict[str, Any], fewer: int, all_nodes: int, in_use: int, ratio: float, lost_h: float
) -> None:
    found = weigh(WorkLeft(**work), fewer, all_nodes, in_use, HOUR)
    assert found.step_time_ratio == pytest.approx(ratio)
    assert found.lost_s / HOUR == pytest.approx(lost_h)
    assert found.best == ("shrink" if lost_h <= 1.0 else "requeue")


@given(
    batch=st.integers(1, 600),
    nodes=st.integers(2, 20).flatmap(lambda n: st.tuples(st.integers(1, n - 1), st.just(n))),
    job_s=st.none() | st.floats(0, 1e6),
    training_s=st.none() | st.floats(0, 1e6),
    wait_s=st.floats(0, 1e6),
)
def test_fewer_nodes_are_never_faster_and_a_longer_wait_never_turns_to_the_queue(
    batch: int, nodes: tuple[int, int], job_s: float | None, training_s: float | None, wait_s: float
) -> None:
    work = WorkLeft(batch, 1, 4, job_s, training_s)
    found = weigh(work, *nodes, nodes[1], wait_s)
    assert found.step_time_ratio >= 1
    assert found.lost_s >= 0
    if found.best == "shrink":
        assert weigh(work, *nodes, nodes[1], 2 * wait_s).best == "shrink"


def test_the_expected_wait_is_what_is_set_or_what_it_was() -> None:
    assert expected_wait_s(history(), settings()) == FIRST_WAIT_S == HOUR
    past = history(waits=(60.0, 9e5, 120.0))
    assert expected_wait_s(past, settings()) == 120.0
    assert expected_wait_s(past, settings(expected_wait_s=7)) == 7.0


@pytest.mark.parametrize(
    ("wait_s", "helper_wait_s", "best", "helper_lost_s"),
    [
        (HOUR, None, "requeue", None),
        (10 * HOUR, None, "shrink", None),
        (None, None, "shrink", None),
        (HOUR, 600.0, "helper", 132.0),
        (100.0, 600.0, "requeue", 132.0),
        (None, 600.0, "helper", 132.0),
        (10 * HOUR, 2 * DAY, "shrink", 4.8 * HOUR),
        (10 * HOUR, 12 * HOUR, "helper", 2.4 * HOUR + 12),
    ],
)
def test_a_helper_job_costs_the_longer_steps_until_it_has_joined(
    wait_s: float | None, helper_wait_s: float | None, best: str, helper_lost_s: float | None
) -> None:
    found = weigh(WorkLeft(**FLAGSHIP, job_s=DAY), 127, 128, 128, wait_s, helper_wait_s)
    assert found.best == best
    assert found.helper_lost_s == (None if helper_lost_s is None else pytest.approx(helper_lost_s))
    assert ("a helper job that is expected in" in str(found)) == (helper_wait_s is not None)


@given(
    work=st.builds(WorkLeft, st.integers(1, 600), st.just(1), st.just(4), st.none() | st.floats(0, 1e6)),
    fewer=st.integers(1, 9),
    wait_s=st.none() | st.floats(0, 1e6),
    helper_s=st.floats(0, 1e6),
)
def test_what_is_chosen_costs_least_and_an_unknown_helper_job_is_never_chosen(
    work: WorkLeft, fewer: int, wait_s: float | None, helper_s: float
) -> None:
    found = weigh(work, fewer, 10, 10, wait_s, helper_s)
    costs = {"shrink": found.lost_s, "helper": found.helper_lost_s, "requeue": found.expected_wait_s}
    assert costs[found.best] == min(cost for cost in costs.values() if cost is not None)
    without = weigh(work, fewer, 10, 10, wait_s)
    assert without.best != "helper"
    assert without.best == found.best or found.best == "helper"


def test_the_expected_wait_of_a_helper_job_is_slurm_s_or_that_of_earlier_ones() -> None:
    past = history(helper_waits=(60.0, 9e5, 120.0))
    assert expected_helper_wait_s(past, 7.0) == 7.0
    assert expected_helper_wait_s(past, -3.0) == 0.0
    assert expected_helper_wait_s(past, None) == 120.0
    assert expected_helper_wait_s(history(), None) is None


class TestHeal:
    ECC = fault("gpu_ras_uncorrectable", gpu="0000:c1:00.0")
    WORK = WorkLeft(12, 1, 2, job_s=DAY)

    @pytest.mark.parametrize(
        ("heal", "min_nodes", "action"),
        [
            ("spare", 2, "stop"), ("shrink", None, "shrink"), ("shrink", 3, "requeue"), ("helper", None, "shrink"),
            ("requeue", 2, "requeue"), ("auto", None, "requeue"), ("auto", 2, "requeue"),
        ],
    )  # fmt: skip
    def test_what_replaces_a_node_without_a_spare(self, heal: str, min_nodes: int | None, action: str) -> None:
        weighs = heal == "auto"
        says = {"heal": heal, "min_nodes": min_nodes}
        decision = decided(self.ECC, says=says, there={"work": self.WORK if weighs else None})
        assert decision.action == action
        if heal == "spare":
            assert decision.reason.endswith("no spare is left (aegis.heal: spare)")

    @pytest.mark.parametrize("heal", get_args(Heal))
    def test_a_spare_takes_the_place_first(self, heal: str) -> None:
        there = {"alive": ("node0", "node1", "node2", "node3"), "work": self.WORK}
        assert decided(self.ECC, says={"heal": heal, "min_nodes": 2}, there=there).action == "swap"

    def test_fewer_nodes_for_a_while_if_a_helper_job_is_expected(self) -> None:
        decision = decided(self.ECC, says={"min_nodes": 2}, there={"work": self.WORK, "helper_wait_s": 60.0})
        assert decision.action == "shrink"
        assert "a helper job that is expected in 1m 00s makes that 40s" in decision.reason

    @pytest.mark.parametrize("heal", ["spare", "requeue"])
    def test_the_ranks_do_not_continue_on_fewer_nodes_if_that_is_not_wanted(self, heal: str) -> None:
        found = why_not_fewer(2, settings(heal=heal, min_nodes=1), lambda: None, lambda: None)
        assert found.reason == f"aegis.heal is {heal}"


class TestDecision:
    ECC = fault("gpu_ras_uncorrectable", gpu="0000:c1:00.0")
    WHAT = "node1, GPU 0000:c1:00.0: uncorrectable memory error of a GPU; "
    WORK = WorkLeft(12, 1, 2, job_s=DAY)  # 3 nodes of 2: 2 sequences a rank, then 3
    MAY: dict[str, Any] = {"min_nodes": 2}  # noqa: RUF012 (no test changes it)

    def test_the_queue_where_the_wait_is_shorter(self) -> None:
        decision = decided(self.ECC, says=self.MAY, there={"work": self.WORK})
        assert (decision.action, decision.exclude, decision.nodes) == ("requeue", ("node1",), ())
        assert (decision.step_time_ratio, decision.expected_wait_s) == (1.5, HOUR)
        assert decision.reason == (
            self.WHAT + "requeue without node1: on 2 nodes a step takes 1.50 times as long, which costs 8h 00m of "
            "work; the expected wait for a replacement is 1h 00m"
        )

    def test_fewer_nodes_where_it_is_longer(self) -> None:
        says = self.MAY | {"expected_wait_s": 10 * HOUR}
        decision = decided(self.ECC, says=says, there={"work": self.WORK})
        assert (decision.action, decision.nodes, decision.exclude) == ("shrink", ("node0", "node2"), ("node1",))
        assert (decision.step_time_ratio, decision.expected_wait_s) == (1.5, 10 * HOUR)
        assert decision.reason == (
            self.WHAT
            + "continue with 2 nodes, without node1: on 2 nodes a step takes 1.50 times as long, which costs "
            "8h 00m of work; the expected wait for a replacement is 10h 00m"
        )

    @pytest.mark.parametrize(
        "there", [{"can_requeue": False}, {"demanded": frozenset({"node1"})}, {"elsewhere": 3}, {"elsewhere": 2}]
    )
    def test_fewer_nodes_where_there_is_no_other(self, there: dict[str, Any]) -> None:
        decision = decided(self.ECC, says=self.MAY, there={"work": self.WORK} | there)
        assert (decision.action, decision.step_time_ratio) == ("shrink", None)
        assert decision.reason.endswith("continue with 2 nodes, without node1: no other node can be had")

    def test_as_many_as_a_requeue_would_get_are_what_counts(self) -> None:
        """Of 4 nodes two are lost, and a requeue would get one of them back."""
        four = ("node0", "node1", "node2", "node3")
        there = {"alive": four, "in_use": four, "needed": 4, "elsewhere": 4}
        decision = decided(self.ECC, says=self.MAY, there=there | {"work": self.WORK})
        assert decision.reason.endswith("no other node can be had"), "Slurm still counts node1 among the four"
        there["elsewhere"], there["alive"] = 3, ("node0", "node2")
        decision = decided(
            fault("node_dead"), fault("node_dead", "node3"), says=self.MAY, there=there | {"work": self.WORK}
        )
        assert (decision.action, decision.n_nodes) == ("requeue", 3)
        assert decision.step_time_ratio == 1.5

    def test_a_spare_is_better_than_both(self) -> None:
        there = {"alive": ("node0", "node1", "node2", "node3"), "work": self.WORK}
        decision = decided(self.ECC, says=self.MAY, there=there)
        assert (decision.action, decision.step_time_ratio) == ("swap", None)

    def test_never_below_min_nodes(self) -> None:
        decision = decided(self.ECC, says={"min_nodes": 3}, there={"work": self.WORK})
        assert (decision.action, decision.step_time_ratio) == ("requeue", None)
