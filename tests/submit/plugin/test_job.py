"""The states of the executor's jobs: sacct's, and squeue's on a site without accounting."""

from __future__ import annotations

import shlex
from pathlib import Path

import pytest

from tests.submit.scripted_slurm import ScriptedSlurm
from zslurm.slurm.jobs import FIELD_END, QUEUE_FIELDS, RECORD_END
from zslurm.submit.plugin import job as job_module
from zslurm.submit.plugin.job import FORGOTTEN, JobWatcher


@pytest.fixture
def slurm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ScriptedSlurm:
    """A site without accounting."""
    scripted = ScriptedSlurm(tmp_path / "bin", monkeypatch)
    scripted.write_program("sacct", "echo Slurm accounting storage is disabled >&2; exit 1")
    return scripted


def queue_shows(slurm: ScriptedSlurm, states: dict[str, str]) -> None:
    records = []
    for job, state in states.items():
        values = dict.fromkeys(QUEUE_FIELDS, "") | {"JobArrayID": job, "State": state, "exit_code": "0"}
        records.append(FIELD_END.join(values[name] for name in QUEUE_FIELDS) + RECORD_END)
    slurm.write_program("squeue", f"printf %s {shlex.quote(chr(10).join(records))}")


def states(watcher: JobWatcher, *jobs: str) -> list[tuple[str, bool]]:
    for job in jobs:
        watcher.register_job(job)
    watcher.update()
    return [(watcher.get_state(job, mode="cache"), watcher.is_done(job, mode="cache")) for job in jobs]


def test_without_accounting_squeue_has_the_states(slurm: ScriptedSlurm) -> None:
    queue_shows(
        slurm, {"7": "RUNNING", "8": "CANCELLED", "9_0": "FAILED", "9_[1-2%4]": "PENDING", "10": "SUSPENDED"}
    )
    found = states(JobWatcher(), "7", "8", "9_0", "9_1", "9_2", "10", "11")
    assert found == [
        ("RUNNING", False),
        ("CANCELLED", True),
        ("FAILED", True),
        ("PENDING", False),
        ("PENDING", False),
        ("SUSPENDED", False),
        ("UNKNOWN", False),  # never seen: it may only just have been submitted
    ]


def test_a_job_that_slurm_has_forgotten_is_over(slurm: ScriptedSlurm) -> None:
    watcher = JobWatcher()
    queue_shows(slurm, {"7": "RUNNING"})
    assert states(watcher, "7") == [("RUNNING", False)]
    slurm.write_program("squeue", "echo slurm_load_jobs error: Invalid job id specified >&2; exit 1")
    assert states(watcher, "7") == [(FORGOTTEN, True)]


def test_an_answer_that_lacks_a_job_is_not_its_end(slurm: ScriptedSlurm, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("time.sleep", lambda seconds: None)
    watcher = JobWatcher()
    queue_shows(slurm, {"7": "RUNNING", "8": "RUNNING"})
    states(watcher, "7", "8")
    queue_shows(slurm, {"8": "RUNNING"})
    assert states(watcher, "7", "8") == [("RUNNING", False), ("RUNNING", False)]
    queue_shows(slurm, {})
    assert states(watcher, "7", "8") == [("RUNNING", False), ("RUNNING", False)]


def test_a_controller_that_does_not_answer_changes_no_state(
    slurm: ScriptedSlurm, caplog: pytest.LogCaptureFixture
) -> None:
    watcher = JobWatcher()
    queue_shows(slurm, {"7": "RUNNING"})
    states(watcher, "7")
    slurm.write_program("squeue", "echo slurm_load_jobs error: Unable to contact slurm controller >&2; exit 1")
    assert states(watcher, "7") == [("RUNNING", False)]


def test_sacct_is_not_asked_again_for_a_while_where_it_fails(
    slurm: ScriptedSlurm, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = tmp_path / "asked"
    slurm.write_program("sacct", f"echo once >> {asked}; exit 1")
    queue_shows(slurm, {"7": "RUNNING"})
    watcher = JobWatcher()
    states(watcher, "7")
    states(watcher, "7")
    assert asked.read_text().split() == ["once"]
    monkeypatch.setattr(job_module, "_ASK_SACCT_AGAIN_S", -1.0)
    states(watcher, "7")
    assert asked.read_text().split() == ["once", "once"]


def test_with_accounting_squeue_is_asked_only_about_what_sacct_does_not_know(slurm: ScriptedSlurm) -> None:
    slurm.write_program("sacct", "printf 'JobID|State|NodeList\\n7|TIMEOUT|n1\\n'")
    queue_shows(slurm, {"7": "RUNNING", "8": "PENDING"})
    assert states(JobWatcher(), "7", "8") == [("TIMEOUT", True), ("PENDING", False)]
