"""The simulation of a run: against closed formulas, against runs that were computed by hand, and its own sums."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import get_args

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from zslurm.aegis.types import WorkLeft
from zslurm.config.aegis import AegisSection, Heal
from zslurm.plan.failures import PRESETS, FailureRates, GivenFaults, Kind, RandomFaults
from zslurm.plan.simulate import Scenario, SimulatedOutcome, simulate
from zslurm.plan.study import Study
from zslurm.plan.young_daly import daly_interval_s, daly_wall_s, young_interval_s

UNLIMITED = AegisSection(retries=10**6, restarts_per_hour=10**6, max_excluded=10**6)
"""Never stops a run."""

TEN = Scenario(steps=100, step_s=10.0, nodes=4, every=10, stall_s=5.0, restart_s=60.0)
"""100 steps of 10 s, and a stall of 5 s after every tenth."""


def with_faults(scenario: Scenario, *faults: tuple[float, Kind]) -> SimulatedOutcome:
    return simulate(scenario, GivenFaults(faults))


def test_without_faults_it_is_the_start_the_steps_and_the_saves() -> None:
    out = with_faults(TEN)
    assert out.wall_s == pytest.approx(60 + 100 * 10 + 10 * 5)
    assert out.finished and out.steps == 100
    assert out.node_s == pytest.approx(4 * out.wall_s)


def test_a_fault_costs_the_steps_since_the_last_save_and_a_restart() -> None:
    """At 60 + 205 + 37 s: two saves are made, and three steps and a part of the fourth are lost."""
    out = with_faults(TEN, (302.0, "process"))
    assert out.parts_s["lost steps"] == pytest.approx(302 - 60 - 2 * 105)
    assert out.wall_s == pytest.approx(with_faults(TEN).wall_s + (302 - 60 - 210) + 60)


def test_a_save_that_is_not_committed_yet_does_not_count() -> None:
    early = with_faults(replace(TEN, write_s=40.0), (60 + 105 + 39.0, "process"))
    late = with_faults(replace(TEN, write_s=40.0), (60 + 105 + 41.0, "process"))
    assert early.parts_s["lost steps"] == pytest.approx(100 + 39.0)
    assert late.parts_s["lost steps"] == pytest.approx(41.0)


def test_recovery_in_memory_loses_a_step_at_most_where_a_copy_is_whole() -> None:
    scenario = replace(TEN, regroup_s=2.0, copy_s=3.0)
    out = with_faults(scenario, (60 + 75.0, "process"))  # five seconds into the eighth step
    assert out.parts_s["lost steps"] == pytest.approx(5.0)
    assert out.parts_s["recovery in memory"] == 2.0
    before_the_copy = with_faults(scenario, (60 + 72.0, "process"))
    assert before_the_copy.parts_s["lost steps"] == pytest.approx(12.0)
    before_any = with_faults(scenario, (60 + 2.0, "process"))
    assert before_any.actions == {"restart": 1}
    everywhere = with_faults(scenario, (60 + 75.0, "restart"))
    assert everywhere.actions == {"restart": 1}


def test_a_fault_during_a_restart_begins_another_one() -> None:
    out = with_faults(TEN, (60 + 110.0, "process"), (60 + 110.0 + 50.0, "process"))
    assert out.parts_s["restart"] == pytest.approx(60 + 50 + 60)
    assert out.faults == {"process": 2}


def test_each_kind_has_its_own_detection() -> None:
    scenario = replace(TEN, detect_s={"hang": 180.0, "process": 1.0})
    assert with_faults(scenario, (100.0, "hang")).parts_s["detection"] == 180.0
    assert with_faults(scenario, (100.0, "process")).parts_s["detection"] == 1.0


def test_a_lost_node_takes_a_spare_then_the_queue_which_gives_spares_again() -> None:
    scenario = replace(TEN, spares=1, wait_s=500.0)
    out = with_faults(scenario, (100.0, "node"), (300.0, "node"), (1400.0, "node"))
    assert out.actions == {"swap": 2, "requeue": 1, "restart": 3}
    assert out.parts_s["queue"] == 500.0
    assert out.node_s == pytest.approx(5 * (out.wall_s - 500.0)), "a job in the queue has no nodes"


def test_fewer_nodes_where_they_cost_less_than_the_wait() -> None:
    scenario = replace(TEN, aegis=AegisSection(min_nodes=3), wait_s=500.0, work=WorkLeft(12, 1, 1))
    out = with_faults(scenario, (100.0, "node"))
    assert out.actions == {"shrink": 1, "restart": 1}
    assert out.parts_s["fewer nodes"] == pytest.approx(100 * 10 / 3, rel=0.05)
    assert with_faults(replace(scenario, wait_s=100.0), (100.0, "node")).actions == {"requeue": 1, "restart": 1}
    even = replace(scenario, slowdown=lambda nodes: 1.0, wait_s=0.0, work=WorkLeft(2, 1, 1))
    assert with_faults(even, (100.0, "node")).parts_s["fewer nodes"] == 0


def test_ranks_continue_in_memory_on_fewer_nodes_until_a_helper_job_has_brought_one() -> None:
    """They lose half a step, and then train on three of four nodes for 60 steps, which takes as long as 80."""
    heals = AegisSection(heal="helper")
    scenario = replace(TEN, steps=200, stall_s=0.0, regroup_s=3.0, wait_s=740.0, helpers=True, aegis=heals)
    out = with_faults(scenario, (60 + 105.0, "node"))
    assert out.actions == {"memory": 1, "shrink": 1, "helper": 1}
    assert out.parts_s["fewer nodes"] == pytest.approx(60 * 10 / 3, abs=10 / 3)
    assert out.parts_s["recovery in memory"] == pytest.approx(2 * 3.0)
    assert out.parts_s["lost steps"] == pytest.approx(5.0)
    never = with_faults(replace(scenario, helpers=False), (60 + 105.0, "node"))
    assert never.actions == {"memory": 1, "shrink": 1}
    assert never.wall_s == pytest.approx(out.wall_s - 3.0 + 130 * 10 / 3, abs=10.0)


def test_a_restart_leaves_out_nodes_of_helper_jobs_until_their_ranks_join_again() -> None:
    heals = AegisSection(heal="helper")
    scenario = replace(TEN, steps=200, regroup_s=3.0, wait_s=100.0, helpers=True, aegis=heals)
    out = with_faults(scenario, (100.0, "node"), (800.0, "restart"))
    assert out.actions == {"memory": 1, "shrink": 2, "helper": 2, "restart": 1}


def test_a_helper_job_waits_for_a_repair_where_the_cluster_has_no_other_node() -> None:
    heals = AegisSection(heal="helper")
    in_memory = replace(TEN, steps=400, stall_s=0.0, regroup_s=3.0, helpers=True, aegis=heals)
    scenario = replace(in_memory, wait_s=100.0, repair_s=2000.0)
    with_another, without = (
        with_faults(replace(scenario, cluster_nodes=nodes), (100.0, "node")).parts_s["fewer nodes"]
        for nodes in (5, 4)
    )
    assert with_another == pytest.approx((100 + 60) / 4, abs=5)
    assert without == pytest.approx((2000 * math.log(2) + 60) / 4, abs=10)


def test_a_lost_batch_node_requeues_the_job_whatever_spares_it_has() -> None:
    scenario = replace(TEN, spares=2, wait_s=500.0, batch_lost_s=20.0, regroup_s=3.0)
    out = simulate(scenario, GivenFaults([(100.0, "node")], [0.2]))
    assert out.actions == {"requeue": 1, "restart": 1}
    assert out.parts_s["queue"] == 500.0
    assert out.parts_s["detection"] == 20.0


def test_a_cluster_of_its_own_waits_for_the_repair() -> None:
    scenario = replace(TEN, cluster_nodes=4, wait_s=10.0, repair_s=1000.0)
    out = with_faults(scenario, (100.0, "node"))
    assert out.parts_s["queue"] == pytest.approx(1000.0 * math.log(2))  # the median of the exponential
    assert with_faults(replace(scenario, cluster_nodes=None), (100.0, "node")).parts_s["queue"] == 10.0


def test_the_time_limit_saves_and_loses_nothing() -> None:
    out = with_faults(replace(TEN, limit_s=500.0, wait_s=120.0, write_s=7.0))
    assert out.actions["time limit"] == 2
    assert out.parts_s["queue"] == 240.0
    assert out.parts_s["lost steps"] < 2 * 10.0 + 7.0, "a part of a step each time, and the last write"
    assert out.finished


def test_writing_that_takes_longer_than_the_interval_makes_it_longer() -> None:
    assert replace(TEN, write_s=201.0).period == 21
    assert with_faults(replace(TEN, write_s=201.0)).parts_s["saving"] < with_faults(TEN).parts_s["saving"] + 201.0


def test_a_run_that_makes_no_progress_is_given_up() -> None:
    hopeless = FailureRates((0.0, 1.0, 0.0, 0.0), "every hour on each GPU")
    out = simulate(replace(TEN, nodes=50, aegis=UNLIMITED), RandomFaults(hopeless, 8, seed=0))
    assert not out.finished
    assert out.wall_s == pytest.approx(50 * (1000 + 1))
    stopped = simulate(replace(TEN, nodes=50), RandomFaults(hopeless, 8, seed=0))
    assert not stopped.finished
    assert "4 failures without a new checkpoint; aegis.retries: 3" in stopped.stopped


def test_aegis_decides_by_the_settings_of_the_run() -> None:
    """Three kills on one node exclude it; a dead node over the limit is replaced, but not excluded."""
    kills = [(60 + 110.0 * number, "process") for number in range(1, 4)]
    assert with_faults(replace(TEN, nodes=1, spares=1), *kills).actions == {"restart": 3, "swap": 1}
    dead = [(60 + 110.0 * number, "node") for number in range(1, 4)]
    few = replace(TEN, spares=3, aegis=AegisSection(max_excluded=2))
    assert with_faults(replace(TEN, spares=3), *dead).actions == {"restart": 3, "swap": 3}
    assert with_faults(few, *dead).actions == {"restart": 3, "swap": 3}
    none_left = replace(TEN, spares=2, aegis=AegisSection(max_excluded=2))
    assert with_faults(none_left, *dead).actions == {"restart": 3, "swap": 2, "requeue": 1}
    once = with_faults(replace(TEN, aegis=AegisSection(retries=0)), (60 + 30.0, "restart"))
    assert once.stopped.endswith("1 failure without a new checkpoint; aegis.retries: 0")
    ends = with_faults(replace(TEN, limit_s=500.0, aegis=AegisSection(requeue_at_time_limit=False)))
    assert ends.stopped == "the time limit; aegis.requeue_at_time_limit is off"


@pytest.mark.parametrize(
    "aegis",
    [
        UNLIMITED.model_copy(update={"min_nodes": 3}),
        AegisSection(max_excluded=2, min_nodes=3),
        AegisSection(retries=1, min_nodes=3),
        AegisSection(heal="helper"),
    ],
    ids=["1", "2", "3", "4"],
)
def test_runs_that_share_decisions_end_as_they_would_alone(aegis: AegisSection) -> None:
    scenario = replace(
        TEN, steps=2000, spares=1, wait_s=300.0, limit_s=9000.0, work=WorkLeft(12, 1, 1), aegis=aegis,
        regroup_s=3.0 if aegis.heal == "helper" else None, helpers=aegis.heal == "helper",
    )  # fmt: skip
    rates = FailureRates((0.05, 0.05, 0.02, 0.01), "test")
    alone = [simulate(scenario, RandomFaults(rates, 8, seed)) for seed in range(20)]
    assert Study(rates, 8).outcomes(scenario, 20) == alone
    assert len({outcome.wall_s for outcome in alone}) > 10


@pytest.mark.parametrize("interval_s", [300, 1700, 6000])
def test_it_agrees_with_daly_within_two_percent(interval_s: int) -> None:
    """Where the formula applies: a constant restart, blocking saves, a node for every lost one."""
    between, restart, save = 4 * 3600.0, 600.0, 120.0
    study = Study(FailureRates((0.0, 0.0, 3600 / between / 8, 0.0), "test"), gpus_per_node=8)
    scenario = Scenario(
        steps=500_000, step_s=10.0, nodes=1, every=interval_s // 10, stall_s=save, restart_s=restart,
        aegis=UNLIMITED,
    )  # fmt: skip
    found = study.predict(scenario, runs=10).wall_s
    assert found.mean == pytest.approx(daly_wall_s(scenario.ideal_s, interval_s, save, restart, between), rel=0.02)


def test_the_advised_interval_is_as_good_as_dalys_within_two_percent() -> None:
    between, save = 6 * 3600.0, 60.0
    study = Study(FailureRates((0.0, 0.0, 3600 / between / 8, 0.0), "test"), gpus_per_node=8)
    scenario = Scenario(steps=100_000, step_s=10.0, nodes=1, stall_s=save, restart_s=300.0, aegis=UNLIMITED)
    best, tried = study.best_interval(scenario, runs=20)
    optimum = daly_interval_s(save, between)
    assert study.daly_interval(scenario) == round(optimum / 10)
    assert optimum == pytest.approx(young_interval_s(save, between) - save * 2 / 3, rel=0.02)
    at_best, at_daly = (
        daly_wall_s(scenario.ideal_s, interval, save, 300.0, between) for interval in (best * 10, optimum)
    )
    assert at_best == pytest.approx(at_daly, rel=0.02)
    assert len(tried) > 5


@settings(max_examples=60, deadline=None)
@given(
    st.integers(1, 3000),
    st.floats(0.1, 30),
    st.integers(1, 300),
    st.floats(0, 30),
    st.floats(0, 100),
    st.sampled_from([None, 1.0]),
    st.integers(0, 2),
    st.sampled_from([None, 2]),
    st.sampled_from(get_args(Heal)),
    st.sampled_from([None, 4000.0]),
    st.integers(0, 100),
)
def test_the_parts_sum_to_the_time_and_the_kept_steps_to_the_work(
    steps: int,
    step_s: float,
    every: int,
    stall: float,
    write: float,
    regroup: float | None,
    spares: int,
    fewest: int | None,
    heal: Heal,
    limit: float | None,
    seed: int,
) -> None:
    scenario = Scenario(
        steps=steps, step_s=step_s, nodes=4, spares=spares, every=every, stall_s=stall, write_s=write,
        detect_s={"hang": 100.0, "node": 3.0}, restart_s=60.0, regroup_s=regroup, copy_every=3, copy_s=2.0,
        wait_s=600.0, repair_s=7200.0, cluster_nodes=4 + spares, limit_s=limit, helpers=heal in ("helper", "auto"),
        aegis=AegisSection(min_nodes=fewest, heal=heal), work=WorkLeft(12, 1, 1),
    )  # fmt: skip
    rates = FailureRates((0.02, 0.01, 0.01, 0.005), "test")
    out = simulate(scenario, RandomFaults(rates, 8, seed))
    assert sum(out.parts_s.values()) == pytest.approx(out.wall_s)
    assert all(part > -1e-6 * out.wall_s for part in out.parts_s.values())
    assert out.parts_s["kept steps"] == pytest.approx(out.steps * step_s)
    assert out.steps == steps or not out.finished
    assert 0 <= out.goodput <= 1


def test_llama_3s_faults_are_as_many_as_published() -> None:
    rates = PRESETS["llama3"]
    assert rates.total * 16384 * 54 * 24 == pytest.approx(419)
    assert Study(rates, 8).between_faults_s(2048) == pytest.approx(54 * 86400 / 419)


def test_an_interval_of_confidence_covers_the_mean_of_many_runs() -> None:
    """Of 20 intervals of 95 %, each from ten runs, at least 15 hold the mean of 200 others."""
    rates = FailureRates((0.0, 0.002, 0.0, 0.0), "test")
    scenario = Scenario(steps=20_000, step_s=10.0, nodes=4, every=100, stall_s=10.0, restart_s=300.0)
    truth = Study(rates, 8, seed=10_000).predict(scenario, 200).goodput.mean
    found = [Study(rates, 8, seed=10 * first).predict(scenario, 10).goodput for first in range(20)]
    assert sum(abs(each.mean - truth) <= each.error for each in found) >= 15
    assert all(each.low <= each.mean <= each.high for each in found)
