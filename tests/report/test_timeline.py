"""Where a run's wall time went: every second is in one part, and only kept steps count as goodput."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.report.runs import TimedStory, failed_once, submitted_at_zero
from zslurm.report.timeline import Timeline, timeline
from zslurm.run.events.event import from_row
from zslurm.run.metrics.columns import read_metrics
from zslurm.train.jsonl import read_jsonl


def of(story: TimedStory, now: float | None = None) -> Timeline:
    rows = [*read_jsonl(story.run.submissions), *read_jsonl(story.run.events)]
    events = [from_row(row) for row in sorted(rows, key=lambda row: row["time"])]
    return timeline(events, read_metrics(story.run.path), now=None if now is None else 1_780_000_000.0 + now)


def test_every_second_of_a_failed_and_restarted_run_is_in_one_part(tmp_path: Path) -> None:
    found = of(failed_once(tmp_path / "run"))
    expected = {"queue": 10, "start": 35, "steps": 320, "lost": 40, "end": 35, "down": 5}
    assert {part: round(seconds, 3) for part, seconds in found.seconds.items()} == expected
    assert found.wall_s == pytest.approx(445)
    assert found.goodput == pytest.approx(320 / 435)
    assert found.goodput_with_queue == pytest.approx(320 / 445)
    assert [(a.number, a.kept, a.lost, a.outcome) for a in found.attempts] == [
        (1, 80, 20, "failed"),
        (2, 80, 0, "completed"),
    ]
    assert found.failures == 1
    assert sum(span.seconds for span in found.spans) == pytest.approx(445)


def test_time_in_which_nobody_had_submitted_the_run_does_not_count(tmp_path: Path) -> None:
    story = submitted_at_zero(tmp_path / "run")
    story.at(10).started(1)
    story.at(20).steps(range(1, 6))
    story.at(30).ended("interrupted", 75)
    story.job_id = "local-2"
    story.at(86_400).event("submit", attempt=None)
    story.at(86_410).started(2)
    story.at(86_420).steps(range(6, 11), attempt=2)
    story.at(86_430).ended("completed", 0, attempt=2)
    found = of(story)
    assert found.wall_s < 100
    assert found.seconds["steps"] == pytest.approx(20)


def test_an_attempt_that_runs_and_one_whose_end_was_never_recorded(tmp_path: Path) -> None:
    story = submitted_at_zero(tmp_path / "run")
    story.at(10).started(1)
    story.at(20).steps(range(1, 6))
    story.at(100).started(2)
    story.at(120).steps(range(6, 8), attempt=2)
    found = of(story, now=130)
    assert [attempt.outcome for attempt in found.attempts] == ["no end recorded", "running"]
    assert found.seconds["down"] == pytest.approx(70), "from its last step on nothing is known of the first one"
    assert found.attempts[1].ended - found.attempts[1].began == pytest.approx(30)
    assert sum(span.seconds for span in found.spans) == pytest.approx(130)


@pytest.mark.parametrize(
    ("between", "down", "queue"),
    [
        ((), 70, 10),
        (("supervisor_started",), 0, 80),
        (("deputy_acted", "supervisor_started"), 20, 60),
        (("adopted",), 70, 10),
    ],
)
def test_after_a_lost_supervisor_the_time_in_the_queue_is_not_time_on_nodes(
    tmp_path: Path, between: tuple[str, ...], down: float, queue: float
) -> None:
    """Slurm requeued the job, or its deputy did; a supervisor in the same start of the job adopts the attempt."""
    story = submitted_at_zero(tmp_path / "run")
    story.at(10).started(1)
    story.at(20).steps(range(1, 6))
    for kind in between:
        if kind == "deputy_acted":
            story.at(50).event(kind, node="node1", reason="the job is requeued")
        else:
            adopted = {"adopted": 1} if kind == "adopted" else {}
            story.at(95).event("supervisor_started", attempt=None, host="node0", **adopted)
    story.at(100).started(2)
    story.at(120).steps(range(6, 8), attempt=2)
    found = of(story, now=130)
    assert found.seconds.get("down", 0) == pytest.approx(down)
    assert found.seconds["queue"] == pytest.approx(queue)
    assert sum(span.seconds for span in found.spans) == pytest.approx(130)


def test_a_run_without_steps_only_started_and_one_without_attempts_has_no_goodput(tmp_path: Path) -> None:
    story = submitted_at_zero(tmp_path / "run")
    assert of(story).goodput is None
    story.at(10).started(1)
    story.at(40).ended("failed", 1)
    found = of(story)
    assert found.goodput == 0
    assert found.seconds["start"] == pytest.approx(30)


def test_steps_without_any_event_are_attempts_too(tmp_path: Path) -> None:
    story = submitted_at_zero(tmp_path / "run")
    story.at(20).steps(range(1, 11), attempt=3)
    found = of(story)
    assert [(attempt.number, attempt.kept) for attempt in found.attempts] == [(3, 10)]
    assert found.seconds["steps"] == pytest.approx(20)


def test_recovery_in_memory_is_a_part_of_its_own(tmp_path: Path) -> None:
    story = submitted_at_zero(tmp_path / "run")
    story.at(10).started(1)
    story.at(20).steps(range(1, 6))
    story.at(31).event(
        "recovered_in_memory", attempt=1, generation=1, ranks=[1], step=4, rolled_back=1, seconds=0.5
    )
    story.at(32).steps(range(5, 11))
    story.at(44).ended("completed", 0)
    found = of(story)
    assert found.seconds["recovery"] == pytest.approx(0.5)
    assert found.seconds["between"] == pytest.approx(1.5)
    assert (found.attempts[0].kept, found.attempts[0].lost) == (10, 1)


def requeued(directory: Path) -> TimedStory:
    """An attempt of 40 steps that ended 100 s after the submission, of a job with a number."""
    story = submitted_at_zero(directory)
    story.job_id = "4711"
    story.at(10).started(1)
    story.at(20).steps(range(1, 41))
    story.at(100).event("attempt_ended", attempt=1, outcome="interrupted", exit_code=75)
    return story


def started_again(story: TimedStory) -> Timeline:
    story.at(600).started(2)
    story.at(610).steps(range(41, 61), attempt=2)
    story.at(650).ended("completed", 0, attempt=2)
    return of(story)


def test_a_job_that_waits_for_a_dead_node_before_its_requeue_holds_its_nodes(tmp_path: Path) -> None:
    story = requeued(tmp_path / "run")
    story.at(460).event("requeued", attempt=None, excluded="", reason="so")
    story.at(461).event("run_ended", attempt=None, outcome="interrupted", exit_code=75)
    found = started_again(story)
    assert found.seconds["down"] == pytest.approx(360)
    assert found.seconds["queue"] == pytest.approx(10 + 140)
    assert found.goodput == pytest.approx(120 / (651 - 150))
    assert sum(span.seconds for span in found.spans) == pytest.approx(651)


def test_a_job_that_slurm_requeued_by_itself_waits_in_the_queue(tmp_path: Path) -> None:
    story = requeued(tmp_path / "run")
    story.at(101).event("run_ended", attempt=None, outcome="interrupted", exit_code=75)
    found = started_again(story)
    assert found.seconds["queue"] == pytest.approx(10 + 499)
    assert found.goodput_with_queue == pytest.approx(120 / 651)


def test_a_run_that_was_cancelled_waits_for_nothing(tmp_path: Path) -> None:
    story = requeued(tmp_path / "run")
    story.at(101).event("run_ended", attempt=None, outcome="interrupted", exit_code=75)
    story.at(102).event("cancel", attempt=None)
    assert started_again(story).seconds["queue"] == pytest.approx(10)
