"""Two jobs of one run: which of them the run depends on, and when the second has nothing to do.

What Slurm says is given here as records; tests/on_slurm has a real Slurm whose nodes have no scontrol.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from tests.slurm.recordings import recorded
from tests.submit.specs import run_spec
from zslurm.job.successor import SUCCESSOR_OF, successor_spec, why_not_needed
from zslurm.run.events import Cancelled, Submitted, SuccessorSubmitted
from zslurm.run.run_dir import RunDir
from zslurm.run.state import run_state
from zslurm.run.state.run_state import RunState, look
from zslurm.slurm.jobs import JobRecord, parse_queue
from zslurm.slurm.queue_view import QueueView
from zslurm.slurm.states import JobState
from zslurm.submit.submit import record_action
from zslurm.train.jsonl import JsonLinesWriter

RECORD = parse_queue(recorded.SQUEUE)["4"]
ON_SLURM = {"name": "lab", "launcher": "slurm"}


class TwoJobs:
    """A run that was submitted as job 12, with job 13 to continue it."""

    def __init__(self, directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.spec = run_spec(directory, cluster=ON_SLURM)
        self.run = RunDir(directory / "runs" / "tiny")
        self.run.create(group_readable=False)
        self.run.config.write_text(self.spec.model_dump_json())
        record_action(self.run, Submitted(job_id="12"), self.spec)
        record_action(self.run, SuccessorSubmitted(job_id="12", successor="13"), self.spec)
        self.jobs: dict[str, JobRecord] = {}
        self.problem: str | None = None
        monkeypatch.setattr(run_state, "ask_slurm", lambda ids: QueueView(self.jobs, problem=self.problem))

    def slurm_says(self, **states: JobState) -> TwoJobs:
        self.jobs = {
            job_id.removeprefix("job"): replace(RECORD, job_id=job_id.removeprefix("job"), state=state)
            for job_id, state in states.items()
        }
        return self

    def event(self, kind: str, job_id: str, **fields: object) -> TwoJobs:
        with JsonLinesWriter(self.run.events) as lines:
            lines.append({"time": 2e9, "event": kind, "job_id": job_id, **fields})
        return self

    def ended(self, job_id: str, outcome: str, code: int) -> TwoJobs:
        return self.event("run_ended", job_id, outcome=outcome, exit_code=code)

    @property
    def state(self) -> RunState:
        return look(self.run)


@pytest.fixture
def two(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> TwoJobs:
    return TwoJobs(tmp_path, monkeypatch)


def test_while_the_first_runs_the_second_is_only_mentioned(two: TwoJobs) -> None:
    state = two.slurm_says(job12=JobState.RUNNING, job13=JobState.PENDING).state
    assert (state.state, state.job_id, state.successor) == ("running", "12", "13")


def test_where_the_first_ended_early_the_second_is_the_runs_job(two: TwoJobs) -> None:
    two.ended("12", "interrupted", 75).slurm_says(job12=JobState.TIMEOUT, job13=JobState.PENDING)
    assert (two.state.state, two.state.job_id, two.state.successor) == ("pending", "13", None)
    assert two.state.active
    two.slurm_says(job13=JobState.RUNNING)
    assert (two.state.state, two.state.job_id) == ("running", "13")
    two.event("attempt_started", "13", attempt=2).ended("13", "completed", 0).slurm_says()
    assert (two.state.state, two.state.job_id, two.state.exit_code) == ("completed", "13", 0)


def test_a_first_that_left_no_word_is_continued_too(two: TwoJobs) -> None:
    two.slurm_says(job12=JobState.NODE_FAIL, job13=JobState.RUNNING)
    assert (two.state.state, two.state.job_id) == ("running", "13")


@pytest.mark.parametrize(("outcome", "code"), [("completed", 0), ("failed", 1)])
def test_a_run_that_came_to_its_end_stays_with_the_first(two: TwoJobs, outcome: str, code: int) -> None:
    two.ended("12", outcome, code).slurm_says(job12=JobState.COMPLETED, job13=JobState.PENDING)
    assert (two.state.state, two.state.job_id, two.state.active) == (outcome, "12", False)
    two.event("successor_ended", "13", reason="...").slurm_says(job13=JobState.COMPLETED)
    assert (two.state.state, two.state.job_id) == (outcome, "12")


def test_a_cancelled_run_stays_cancelled(two: TwoJobs) -> None:
    record_action(two.run, Cancelled(job_id="12"), two.spec)
    two.ended("12", "interrupted", 75).slurm_says(job12=JobState.CANCELLED, job13=JobState.CANCELLED)
    assert (two.state.state, two.state.job_id) == ("cancelled", "12")


def test_cancelling_the_second_cancels_the_run(two: TwoJobs) -> None:
    record_action(two.run, Cancelled(job_id="13"), two.spec)
    two.slurm_says(job12=JobState.TIMEOUT, job13=JobState.CANCELLED)
    assert two.state.active is False
    assert why_not_needed(two.run, {SUCCESSOR_OF: "12"}) == "the run was cancelled"


def test_where_slurm_does_not_answer_nobody_knows(two: TwoJobs) -> None:
    two.problem = "the Slurm controller does not answer"
    assert (two.state.state, two.state.job_id, two.state.active) == ("unknown", "12", True)


def test_the_second_is_submitted_with_a_dependency_and_knows_whose_it_is(two: TwoJobs) -> None:
    found = successor_spec(two.spec, "12")
    assert found.slurm.flags == {"dependency": "singleton"}
    assert found.cluster.env == {SUCCESSOR_OF: "12"}
    assert two.spec.slurm.flags == {}


def test_when_the_second_has_nothing_to_do(two: TwoJobs) -> None:
    mine = {SUCCESSOR_OF: "12"}
    assert why_not_needed(two.run, {}) is None, "no successor"
    assert why_not_needed(two.run, mine) is None
    two.ended("12", "interrupted", 75)
    assert why_not_needed(two.run, mine) is None
    two.ended("12", "completed", 0)
    assert why_not_needed(two.run, mine) == "the run came to its end in job 12"
    record_action(two.run, Submitted(job_id="14"), two.spec)
    assert why_not_needed(two.run, mine) == "the run was submitted again, as job 14"


@pytest.mark.parametrize(
    ("successor", "scontrol", "wanted"),
    [
        ("auto", None, False),
        ("auto", True, False),
        ("auto", False, True),
        ("on", True, True),
        ("off", False, False),
    ],
)
def test_when_there_is_one(tmp_path: Path, successor: str, scontrol: bool | None, wanted: bool) -> None:
    cluster = ON_SLURM | {"scontrol_on_nodes": scontrol}
    assert run_spec(tmp_path, cluster=cluster, slurm={"successor": successor}).wants_successor is wanted


def test_a_local_run_has_none(tmp_path: Path) -> None:
    assert run_spec(tmp_path, slurm={"successor": "on"}).wants_successor is False
