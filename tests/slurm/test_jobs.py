"""Records say what squeue and sacct printed, whatever users wrote into names and comments."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

import pytest
from pydantic import TypeAdapter

from tests.slurm.recordings import recorded, recorded_elsewhere
from zslurm.core.errors import SlurmRefused
from zslurm.slurm.jobs import (
    ExitCode,
    JobRecord,
    parse_duration,
    parse_history,
    parse_queue,
    parse_steps,
    parse_time,
    time_limit,
)
from zslurm.slurm.states import JobState

STRANGE_NAME = 'we|ird, "na me" JobState=RUNNING'


def test_every_job_of_the_queue_is_read() -> None:
    jobs = parse_queue(recorded.SQUEUE)
    assert {job_id: job.state for job_id, job in jobs.items()} == {
        "1": JobState.COMPLETED,
        "2": JobState.FAILED,
        "3": JobState.FAILED,
        "4": JobState.RUNNING,
        "5": JobState.PENDING,
        "6": JobState.CANCELLED,
        "7": JobState.PENDING,
        "8": JobState.PENDING,
        "9_[0-3]": JobState.PENDING,
    }


def test_a_running_job_has_nodes_and_times() -> None:
    job = parse_queue(recorded.SQUEUE)["4"]
    assert (job.nodes, job.n_nodes, job.restarts, job.exit_code) == ("node[0-1]", 2, 0, ExitCode(0, 0))
    assert job.start_time == datetime(2026, 11, 21, 14, 23, 29, tzinfo=UTC)
    assert job.time_limit == timedelta(hours=20, minutes=3)
    assert job.end_time == job.start_time + job.time_limit
    assert (job.user, job.partition, job.comment, job.reason) == ("zslurm-test", "batch", "", "")


def test_names_and_comments_may_hold_anything() -> None:
    job = parse_queue(recorded.SQUEUE)["2"]
    assert (job.name, job.comment) == (STRANGE_NAME, "two\nlines | here")
    assert job.work_dir.endswith("/user/home")
    assert parse_history(recorded.SACCT)["2"][0].comment == "two\nlines | here"


def test_exit_codes_and_signals_are_distinguished() -> None:
    queue, history = parse_queue(recorded.SQUEUE), parse_history(recorded.SACCT)
    assert queue["2"].exit_code == history["2"][0].exit_code == ExitCode(3, 0)
    assert queue["3"].exit_code == history["3"][0].exit_code == ExitCode(0, 9)


def test_a_requeued_job_waits_with_a_reason_and_has_a_restart() -> None:
    jobs = parse_queue(recorded.SQUEUE)
    assert (jobs["7"].restarts, jobs["7"].reason, jobs["7"].nodes) == (1, "BeginTime", "")
    assert jobs["8"].reason == "job requeued in held state"
    assert jobs["5"].reason == "JobHeldUser"
    assert jobs["5"].start_time is None
    assert parse_history(recorded.SACCT)["7"][0].state is JobState.REQUEUED


def test_the_runs_of_a_job_count_its_restarts() -> None:
    first = next(line for line in recorded.SACCT.splitlines(keepends=True) if line.startswith("7\x1f"))
    runs = parse_history(recorded.SACCT + first.replace("REQUEUED", "RUNNING"))["7"]
    assert [(run.state, run.restarts) for run in runs] == [(JobState.REQUEUED, 0), (JobState.RUNNING, 1)]


def test_accounting_names_who_cancelled_but_the_state_is_plain() -> None:
    job = parse_history(recorded.SACCT)["6"][0]
    assert (job.state, job.nodes) == (JobState.CANCELLED, "node0")


def test_nothing_is_no_jobs() -> None:
    assert parse_queue("") == {}
    assert parse_history("") == {}


def test_a_missing_field_is_noticed() -> None:
    # squeue leaves out a field that it does not know, complains on stderr, and ends with 0.
    with pytest.raises(SlurmRefused, match="expected 16 fields, got 15"):
        parse_queue(recorded.SQUEUE.replace("\x1fbatch\x1f", "\x1f"))


@pytest.mark.parametrize(
    ("text", "duration"),
    [
        ("1-02:03:04", timedelta(days=1, hours=2, minutes=3, seconds=4)),
        ("20:03:00", timedelta(hours=20, minutes=3)),
        ("10:00", timedelta(minutes=10)),
        ("0:30", timedelta(seconds=30)),
        ("UNLIMITED", None),
        ("Partition_Limit", None),
        ("NOT_SET", None),
        ("", None),
    ],
)
def test_durations(text: str, duration: timedelta | None) -> None:
    assert parse_duration(text) == duration


@pytest.mark.parametrize("text", ["N/A", "Unknown", "None", ""])
def test_an_unknown_time_is_none(text: str) -> None:
    assert parse_time(text) is None


@pytest.mark.parametrize(
    ("text", "limit"),
    [
        ("5", timedelta(minutes=5)),
        ("10:00", timedelta(minutes=10)),
        ("1:02:03", timedelta(hours=1, minutes=2, seconds=3)),
        ("2-12", timedelta(days=2, hours=12)),
        ("UNLIMITED", None),
    ],
)
def test_time_limits_as_sbatch_takes_them(text: str, limit: timedelta | None) -> None:
    assert time_limit(text) == limit


def test_a_record_survives_a_file() -> None:
    records = [*parse_queue(recorded.SQUEUE).values(), *parse_history(recorded.SACCT)["7"]]
    file = TypeAdapter(list[JobRecord])
    assert file.validate_json(file.dump_json(records)) == records


def test_fields_that_were_not_asked_for_are_empty() -> None:
    job = parse_queue("12\x1fRUNNING\x1e\n", ["JobArrayID", "State"])["12"]
    assert (job.state, job.nodes, job.n_nodes, job.start_time, job.exit_code) == (
        JobState.RUNNING, "", 0, None, ExitCode(0, 0),
    )  # fmt: skip


def test_steps_of_a_job_with_a_step_manager() -> None:
    """`squeue --steps` lists only the first two of them."""
    assert parse_steps(recorded_elsewhere.STEPS_26_05) == {
        "1.extern": "extern", "1.batch": "batch", "1.0": "attempt-1", "1.1": "a b",
    }  # fmt: skip
    assert parse_steps("") == {}
