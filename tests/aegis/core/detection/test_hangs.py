"""Which rank hangs, and after how long."""

from __future__ import annotations

import pytest

from tests.aegis.core.detection.simulated_training import SETTINGS, WALL, Training
from zslurm.aegis.core.detection.detector import Detector
from zslurm.aegis.protocol import ProgressReport, RankProgress, Stamp
from zslurm.train.progress import Phase


def test_the_rank_that_stopped_is_named_and_not_those_that_wait_for_it() -> None:
    training = Training()
    training.run(31)
    training.stopped[3] = training.now
    assert training.run(19) == []
    (fault,) = training.run(10)
    assert (fault.kind, fault.role, fault.node, fault.rank, fault.step) == ("rank_hang", "root", "node1", 3, 15)
    assert fault.time == pytest.approx(training.wall, abs=10)
    assert "in step 16 (limit 20 s); 3 of 4 ranks are further" in fault.line
    assert training.run(60) == [], "once is enough"


def test_a_rank_that_was_stopped_while_it_waited_for_others_is_named_all_the_same() -> None:
    training = Training()
    training.run(31)
    training.stuck = training.now
    training.halted = {2}
    (fault,) = training.run(40)
    assert (fault.kind, fault.rank, fault.node) == ("rank_hang", 2, "node1")
    assert "its process stopped" in fault.line


def test_records_of_an_earlier_run_of_the_same_name_are_passed_over() -> None:
    """Its ranks and agent were killed, so their records are still in the memory of the node."""
    training = Training()
    older = RankProgress(1, 3288, Phase.STEP, 21, -1, 1623.0, True, 20.0, False)
    report = ProgressReport(training.stamp(0), training.attempt, (older,))
    training.detector.feed(report, training.now + 0.1)
    assert training.detector.check(training.now + 0.2, training.wall) == []
    assert training.detector.step == -1
    training.stopped[1] = training.now + 30  # its own records count
    assert training.kinds(training.run(60)) == [("rank_hang", "node0", 1)]


def test_several_lagging_ranks_are_each_named() -> None:
    training = Training(nodes=4)
    training.run(31)
    training.stopped |= {0: training.now, 5: training.now}
    assert training.kinds(training.run(40)) == [("rank_hang", "node0", 0), ("rank_hang", "node2", 5)]


def test_where_all_are_at_the_same_point_none_is_singled_out() -> None:
    training = Training()
    training.run(31)
    training.stuck = training.now
    (fault,) = training.run(60)
    assert (fault.kind, fault.node, fault.rank, fault.step) == ("rank_hang", None, None, 15)
    assert "4 of 4 ranks stand still in step 16, waiting for others" in fault.line


def test_a_slow_model_gets_as_long_as_its_own_steps_allow() -> None:
    training = Training(step_s=30.0)
    training.run(200)
    training.stopped[1] = training.now
    assert training.run(130) == [], "5 medians of 30 s, not 20 s"
    assert training.kinds(training.run(40)) == [("rank_hang", "node0", 1)]


def test_before_a_step_time_is_known_a_step_may_take_as_long_as_the_setup() -> None:
    """Also after a supervisor was replaced, which knows no step times at first."""
    training = Training(step_s=90.0, adopted=True)
    assert training.run(400) == []


def test_a_program_that_shows_its_progress_on_one_rank_alone_hangs_as_a_whole() -> None:
    """The others may wait for it, or it for them: none is singled out."""
    detector = Detector(SETTINGS)
    detector.begin(1, ["node0", "node1"], 0.0)
    found = []
    for second in range(60):
        ages = {"node0": (Phase.ALIVE, max(0.0, second - 10.0)), "node1": (Phase.UNOBSERVED, float(second))}
        for rank, (node, (phase, age)) in enumerate(ages.items()):
            row = RankProgress(rank, rank, phase, -1, -1, age)
            detector.feed(ProgressReport(Stamp(node, second, 0, 0), 1, (row,)), float(second))
        found += detector.check(float(second), WALL + second)
    (fault,) = found
    assert (fault.kind, fault.rank, fault.node) == ("rank_hang", None, None)
    assert "1 of 1 rank stand still without a sign of life for 2" in fault.line


@pytest.mark.parametrize(("phase", "limit"), [(Phase.SETUP, 100), (Phase.SAVE, 60), (Phase.EVAL, 40)])
def test_each_phase_has_its_own_limit(phase: Phase, limit: int) -> None:
    training = Training()
    training.run(31)
    training.phase, training.stopped = phase, {2: training.now}
    assert training.run(limit - 1) == []
    assert training.kinds(training.run(3)) == [("rank_hang", "node1", 2)]


def test_who_waits_for_a_rank_within_its_limit_does_not_hang() -> None:
    detector = Detector(SETTINGS)
    detector.begin(1, ["node0", "node0"], 0.0)
    for second in range(10):
        rows = [RankProgress(rank, rank, Phase.STEP, second, -1, 0.0) for rank in range(2)]
        detector.feed(ProgressReport(Stamp("node0", second, 0, 0), 1, tuple(rows)), float(second))
    saves = RankProgress(0, 0, Phase.SAVE, 9, -1, 50.0)
    waits = RankProgress(1, 1, Phase.STEP, 9, -1, 50.0, waiting=True)
    detector.feed(ProgressReport(Stamp("node0", 60, 0, 0), 1, (saves, waits)), 60.0)
    assert detector.check(60.0, WALL) == [], "60 s are allowed for a save"
    detector.feed(
        ProgressReport(Stamp("node0", 71, 0, 0), 1, (saves.__class__(0, 0, Phase.SAVE, 9, -1, 61.0), waits)), 71.0
    )
    assert [fault.rank for fault in detector.check(71.0, WALL)] == [0]


def test_a_rank_that_never_left_a_sign_hangs_in_its_setup() -> None:
    training = Training(missing={3})
    training.phase = Phase.SETUP
    assert training.run(99) == []
    assert training.kinds(training.run(5)) == [("rank_hang", "node1", 3)]


def test_a_rank_that_ended_in_order_does_not_hang() -> None:
    training = Training()
    training.run(30)
    training.missing = {0, 1}
    training.stopped = {2: training.now}
    assert [rank for _, _, rank in training.kinds(training.run(60))] == [2]


def test_a_rank_that_is_done_may_take_its_time() -> None:
    training = Training()
    training.run(30)
    training.phase = Phase.DONE
    training.stopped = dict.fromkeys(range(4), training.now)
    assert training.run(1000) == []


def test_the_progress_of_an_earlier_attempt_is_not_looked_at() -> None:
    training = Training()
    training.run(31)
    training.stopped[3] = training.now
    assert len(training.run(40)) == 1
    training.detector.begin(2, training.rank_nodes, training.now)
    assert training.run(60) == [], "the agents still report the attempt that hung"


def test_an_adopted_attempt_hangs_by_the_step_times_before_its_adoption() -> None:
    """Nobody has finished a step since; without them a step may take as long as a setup."""
    stopped = {"adopted": True, "stopped": {2: 1000.0}, "now": 1000.0}
    assert Training(**stopped).run(90) == []
    known = Training(**stopped, known_step_times=(2.0, 2.1, 40.0))
    assert known.kinds(known.run(30)) == [("rank_hang", "node1", 2)]


def test_a_hang_is_found_after_the_ranks_of_a_dead_node_moved_elsewhere() -> None:
    training = Training(nodes=3)
    training.run(31)
    training.silent.add(2)
    training.stopped |= {4: training.now, 5: training.now}
    assert training.kinds(training.run(10)) == [("node_dead", "node2", None)]
    training.stopped.clear()
    for rank in (4, 5):
        training.move(rank, 1)
    training.run(31)
    training.stopped[3] = training.now
    assert ("rank_hang", "node1", 3) in training.kinds(training.run(60))


def test_ranks_that_waited_for_one_that_was_replaced_do_not_hang() -> None:
    """Their reports still show how long they waited, until they finish the next step."""
    training = Training(nodes=2)
    training.run(31)
    training.stopped[3] = training.now
    training.halted.add(3)
    assert training.kinds(training.run(60)) == [("rank_hang", "node1", 3)]
    training.missing.add(3)  # the new process has not reported yet
    training.move(3, 1)
    assert training.run(10) == []
    assert {fault.kind for fault in training.run(60)} == {"rank_hang"}, "it does not come back to life either"


def test_ranks_that_were_suspended_after_they_regrouped_do_not_hang() -> None:
    training = Training()
    training.run(31)
    training.detector.regroup(training.now)
    training.detector.excuse(100.0, training.now + 101)
    training.now += 101
    for node in range(2):
        numbers = (2 * node, 2 * node + 1)
        rows = tuple(RankProgress(rank, 100 + rank, Phase.STEP, 15, -1, 25.0, True) for rank in numbers)
        report = ProgressReport(training.stamp(node), training.attempt, rows)
        training.detector.feed(report, training.now)
    assert training.detector.check(training.now, WALL) == []
