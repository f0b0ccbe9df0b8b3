"""The job's comment: one harmless line behind what others wrote there, and never in anybody's way."""

from __future__ import annotations

import threading
from dataclasses import replace
from typing import Any

import pytest

from tests.waiting import DEADLINE_S
from zslurm.aegis.notify.job_comment import LONGEST, JobComment, beside, cause_line, plain
from zslurm.core.errors import SlurmUnavailable
from zslurm.run.events.event import from_row
from zslurm.slurm.jobs import FIELD_END, QUEUE_FIELDS, RECORD_END, JobRecord, parse_queue

ROOT = {"kind": "rank_killed", "role": "root", "scope": "unknown", "line": "Killed", "node": "node1", "rank": 3}
DECISION = {"time": 1.0, "event": "decision", "attempt": 2, "action": "restart", "mode": "act", "root": ROOT}
ENDED = {"time": 1.0, "event": "run_ended", "outcome": "failed", "cause": {"message": "Killed", "rank": 3}}


def record(comment: str) -> JobRecord:
    values = {"JobArrayID": "7", "State": "RUNNING", "NumNodes": "2", "RestartCnt": "0", "Comment": comment}
    text = FIELD_END.join(values.get(name, "") for name in QUEUE_FIELDS) + RECORD_END
    return parse_queue(text, QUEUE_FIELDS)["7"]


class Slurm:
    """The two calls that a comment needs."""

    def __init__(self, comment: str = "", *, away: bool = False) -> None:
        self.record, self.away = record(comment), away
        self.updates: list[str] = []
        self.asked = threading.Event()
        self.answers = threading.Event()
        self.answers.set()

    def job(self, job_id: str) -> JobRecord | None:
        self.asked.set()
        assert self.answers.wait(DEADLINE_S)
        if self.away:
            raise SlurmUnavailable("the Slurm controller does not answer")
        return self.record

    def update(self, job_id: str, **settings: str) -> None:
        self.updates.append(settings["Comment"])
        self.record = replace(self.record, comment=settings["Comment"])


def failures_of(slurm: Slurm, *events: dict[str, Any]) -> list[str]:
    """What is reported of failures, when all was tried."""
    failures: list[str] = []
    comment = JobComment("7", {}, failures.append, client=slurm)
    for event in events:
        comment.notify(from_row(event))
        comment.flush(DEADLINE_S)
    comment.close(DEADLINE_S)
    return failures


def test_a_decision_and_the_end_hold_their_cause() -> None:
    line = cause_line(from_row(DECISION)) or ""
    assert line[11:] == " attempt 2, restart: rank killed on node1, rank 3: Killed"
    assert (cause_line(from_row(ENDED)) or "").endswith(" the run, failed: rank 3: Killed")


@pytest.mark.parametrize(
    "event",
    [
        {"event": "attempt_started"},
        {},
        DECISION | {"mode": "observe"},
        DECISION | {"root": None},
        DECISION | {"root": {"line": "no kind"}},
        {"event": "run_ended", "outcome": "completed", "cause": None},
        {"event": "run_ended", "cause": "broken"},
    ],
)
def test_other_events_say_nothing(event: dict[str, Any]) -> None:
    assert cause_line(from_row(event)) is None


@pytest.mark.parametrize(
    ("text", "written"),
    [
        ("a\nb\tc\x1f\x1e\x00d", "a b c d"),
        ("JobState=FAILED | x; 'y' \"z\" `w` $(v) \\ <u>", "JobState FAILED x y z w (v) u"),
        ("Grüße 🙂 \u2028 end", "Gr e end"),
        ("API_KEY=abcdef123456 refused", "API_KEY [redacted] refused"),
        ("", ""),
    ],
)
def test_only_harmless_characters_are_written(text: str, written: str) -> None:
    assert plain(text) == written


def test_a_comment_is_short() -> None:
    line = beside("", plain("x" * 10**6))
    assert len(line) == LONGEST
    assert line.endswith("...")


def test_what_others_wrote_stays() -> None:
    first = beside("project A; b", "one")
    assert first == "project A; b; zslurm: one"
    assert beside(first, "two") == "project A; b; zslurm: two"
    assert beside(beside("", "one"), "two") == "zslurm: two"


def test_the_last_cause_is_written_once() -> None:
    slurm = Slurm("project A")
    assert failures_of(slurm, DECISION, DECISION, {"event": "signal"}, ENDED) == []
    assert [update.partition(" zslurm: ")[2][11:28] for update in slurm.updates] == [
        " attempt 2, resta",
        " the run, failed:",
    ]
    assert all(update.startswith("project A; zslurm: ") for update in slurm.updates)


def test_a_slurm_that_is_away_is_reported_once_and_asked_again_next_time() -> None:
    slurm = Slurm(away=True)
    assert failures_of(slurm, DECISION, ENDED) == ["job comment: the Slurm controller does not answer"]
    assert slurm.updates == []


def test_the_supervisor_does_not_wait_for_slurm_and_only_the_newest_cause_is_kept() -> None:
    slurm = Slurm()
    slurm.answers.clear()
    comment = JobComment("7", {}, client=slurm)
    comment.notify(from_row(DECISION))
    assert slurm.asked.wait(DEADLINE_S), "the first is under way"
    for attempt in (3, 4, 5):
        comment.notify(from_row(DECISION | {"attempt": attempt}))
    slurm.answers.set()
    comment.flush(DEADLINE_S)
    comment.close(DEADLINE_S)
    assert ["attempt 2" in slurm.updates[0], "attempt 5" in slurm.updates[-1], len(slurm.updates)] == [
        True,
        True,
        2,
    ]
