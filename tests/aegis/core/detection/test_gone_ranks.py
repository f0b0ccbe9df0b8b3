"""Ranks whose processes are gone by the agents of their nodes, and of which srun has reported nothing."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from tests.aegis.core.detection.simulated_training import Training
from zslurm.aegis.core.detection.attempt_progress import GONE_S
from zslurm.aegis.protocol import ProgressReport
from zslurm.train.progress import Phase


def _with_gone(rank: int, **training: object) -> Training:
    """A training in which the process of a rank has just ended."""
    made = Training(**training)  # type: ignore[arg-type]
    made.run(31)
    made.stopped[rank] = made.now
    made.gone = {rank}
    return made


def test_a_rank_is_gone_once_srun_has_had_time_to_report_it() -> None:
    training = _with_gone(3)
    training.run(round(GONE_S))
    assert training.detector.gone(training.now) == {}
    training.run(2)
    assert training.detector.gone(training.now) == {3: pytest.approx(GONE_S + 1, abs=0.5)}


def test_an_agent_that_falls_silent_has_not_reported_it_for_long_enough() -> None:
    """Its node may be dead, which explains more."""
    training = _with_gone(3)
    training.run(2)
    training.silent = {1}
    training.run(round(GONE_S) + 5)
    assert training.detector.gone(training.now) == {}


def test_a_rank_that_removes_its_progress_in_time_has_ended_in_order() -> None:
    training = _with_gone(3)
    training.run(5)
    training.missing = {3}
    training.run(60)
    assert training.detector.gone(training.now) == {}


def test_a_rank_that_was_done_is_not_gone() -> None:
    training = _with_gone(3)
    training.phase = Phase.DONE
    training.run(60)
    assert training.detector.gone(training.now) == {}


def test_time_in_which_the_job_was_suspended_is_no_time_for_srun() -> None:
    training = _with_gone(3)
    training.run(2)
    training.now += 600
    training.run(5)
    assert training.detector.gone(training.now) == {}
    training.run(10)
    assert set(training.detector.gone(training.now)) == {3}


def test_the_record_of_a_process_that_was_replaced_says_nothing_of_the_next_one() -> None:
    """The record of a process stays until the next process writes its own."""
    training = _with_gone(3)
    training.run(20)
    training.move(3, 1)
    training.run(60)
    assert training.detector.gone(training.now) == {}
    training.move(3, 0)  # on another node; the agent of the former node still reads the old record
    training.moved.clear()
    training.run(60)
    assert training.detector.gone(training.now) == {}


def test_a_rank_whose_process_is_gone_does_not_hang() -> None:
    """Even if its limit passes before the time in which srun may report it."""
    training = _with_gone(3)
    training.gone = set()
    assert training.run(18) == []
    training.gone = {3}
    assert training.run(round(GONE_S) + 3) == []
    assert set(training.detector.gone(training.now)) == {3}


def test_ranks_that_wait_longer_for_a_rank_that_was_not_taken_as_killed_hang() -> None:
    training = _with_gone(3)
    assert training.kinds(training.run(60)) == [("rank_hang", "node1", 3)]


def test_a_rank_that_goes_on_writing_is_not_gone() -> None:
    """Its agent looks at another process: in a container the rank has pids of its own."""
    training = Training()
    training.run(31)
    training.gone = {3}
    training.run(60)
    assert training.detector.gone(training.now) == {}
    assert training.found == []


def test_the_record_on_a_node_that_a_rank_has_left_says_nothing_of_it() -> None:
    """A process that was stuck in a device call could not remove its record, which its agent still reports."""
    training = Training(nodes=3)
    training.run(31)
    stale = replace(training.record(1), pid=77)
    training.detector.feed(ProgressReport(training.stamp(0), 1, (stale,)), training.now + 0.15)
    training.move(1, 2)
    left_at = training.now
    for _ in range(120):
        training.second()
        old = replace(stale, age_s=stale.age_s + training.now - left_at)
        training.detector.feed(ProgressReport(training.stamp(0), 1, (old,)), training.now + 0.15)
    assert [fault for fault in training.found if fault.rank == 1] == []
    training.stopped[1], training.gone = training.now, {1}
    for _ in range(round(GONE_S) + 2):
        training.second()
        old = replace(stale, age_s=stale.age_s + training.now - left_at)
        training.detector.feed(ProgressReport(training.stamp(0), 1, (old,)), training.now + 0.15)
    assert set(training.detector.gone(training.now)) == {1}
