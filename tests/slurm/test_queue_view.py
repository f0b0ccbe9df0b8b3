"""The shared view of the queue: few calls, never older than what was done, and with its age when Slurm is away.

squeue here is a script that prints what the real one was recorded to print, and counts its calls.
"""

from __future__ import annotations

import json
import shlex
import time
from pathlib import Path

import pytest

from tests.slurm.recordings import recorded
from zslurm.slurm import queue_view
from zslurm.slurm.queue_view import QueueView, cache_file, view
from zslurm.slurm.states import JobState


class Slurm:
    """squeue and sacct as scripts on the PATH."""

    def __init__(self, directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.directory = directory
        directory.mkdir()
        monkeypatch.setenv("PATH", f"{directory}:/usr/bin:/bin")
        self.works()

    def works(self, text: str = recorded.SQUEUE) -> None:
        self._write("squeue", f"printf %s {shlex.quote(text)}")
        self._write("sacct", "exit 0")

    def is_away(self) -> None:
        self._write("squeue", f"printf %s {shlex.quote(recorded.CONTROLLER_DOWN)} >&2; exit 1")

    def accounting(self, script: str) -> None:
        self._write("sacct", script)

    def calls(self, program: str = "squeue") -> list[str]:
        path = self.directory / f"{program}.calls"
        return path.read_text().split("\n")[:-1] if path.exists() else []

    def _write(self, program: str, script: str) -> None:
        path = self.directory / program
        path.write_text(f'#!/bin/sh\necho "$@" >> {self.directory}/{program}.calls\n{script}\n')
        path.chmod(0o755)


@pytest.fixture
def slurm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Slurm:
    monkeypatch.setattr(queue_view, "FRESH_S", 3600.0)
    return Slurm(tmp_path / "bin", monkeypatch)


def look(*job_ids: str, not_before: float = 0.0) -> QueueView:
    return view(job_ids or ("4",), ["somebody"], not_before)


def age(seconds: float) -> None:
    """Let time pass for what is kept."""
    path = cache_file()
    body = json.loads(path.read_text())
    for name in ("asked", "failed"):
        body[name] -= seconds
    path.write_text(json.dumps(body))


def test_one_call_serves_many_looks_at_any_of_the_jobs_that_were_asked_about(slurm: Slurm) -> None:
    first = look("4", "7", "999")
    assert first.jobs["4"].state is JobState.RUNNING
    assert first.problem is None
    assert look("4", "7", "999") == look("7", "4", "999")
    assert look("4").jobs == first.jobs, "times, limits and exit codes survive the file"
    assert len(slurm.calls()) == 1
    assert "--user=somebody" in slurm.calls()[0]
    assert "--jobs" not in slurm.calls()[0]


def test_what_the_controller_said_of_one_job_serves_for_all_that_it_knows(slurm: Slurm) -> None:
    look("4")
    assert look("7").jobs["7"].state is JobState.PENDING
    assert len(slurm.calls()) == 1
    look("4", "999")
    assert len(slurm.calls()) == 2, "accounting may know it"


def test_an_old_view_is_renewed(slurm: Slurm) -> None:
    look()
    age(4000)
    look()
    assert len(slurm.calls()) == 2


def test_what_was_done_since_makes_the_view_too_old(slurm: Slurm) -> None:
    look()
    look(not_before=time.time())
    assert len(slurm.calls()) == 2


def test_a_clock_that_went_back_makes_the_view_worthless(slurm: Slurm) -> None:
    look()
    age(-5000)
    look()
    assert len(slurm.calls()) == 2


def test_a_controller_that_is_away_leaves_the_last_view_with_its_age(slurm: Slurm) -> None:
    before = look()
    age(4000)
    slurm.is_away()
    after = look()
    assert after.jobs == before.jobs
    assert after.asked == pytest.approx(before.asked - 4000)
    assert "does not answer" in (after.problem or "")


def test_a_controller_that_is_away_is_left_alone_for_a_growing_while(slurm: Slurm) -> None:
    slurm.is_away()
    for _ in range(5):
        assert "does not answer" in (look().problem or "")
    assert len(slurm.calls()) == 1
    age(queue_view._FIRST_PAUSE_S)
    look()
    assert len(slurm.calls()) == 2
    age(queue_view._FIRST_PAUSE_S)
    look()
    assert len(slurm.calls()) == 2, "the second pause is longer"
    age(queue_view._LONGEST_PAUSE_S)
    slurm.works()
    assert look().problem is None
    assert len(slurm.calls()) == 3


def test_what_was_never_seen_is_unknown_where_the_controller_is_away(slurm: Slurm) -> None:
    slurm.is_away()
    assert (look().jobs, look().asked) == ({}, 0.0)


def test_accounting_is_asked_once_about_a_job_that_the_controller_forgot(slurm: Slurm) -> None:
    forgotten = recorded.SACCT.partition("\n")[0] + "\n"
    slurm.works("")
    slurm.accounting(f"printf %s {shlex.quote(forgotten)}")
    assert look("1").jobs["1"].state is JobState.COMPLETED
    age(4000)
    assert look("1").jobs["1"].state is JobState.COMPLETED
    assert (len(slurm.calls()), len(slurm.calls("sacct"))) == (2, 1)


def test_accounting_that_is_away_is_no_reason_to_forget_the_queue(slurm: Slurm) -> None:
    slurm.accounting("echo 'sacct: error: Problem talking to the database' >&2; exit 1")
    seen = look("4", "999")
    assert seen.jobs["4"].state is JobState.RUNNING
    assert seen.problem is None
    assert "Problem talking to the database" in (seen.no_history or "")


@pytest.mark.parametrize("content", ["", "{", "[]", '{"users": 7}', '{"jobs": {"1": {}}, "ended": {}}', "\x00"])
def test_a_damaged_file_is_no_view(slurm: Slurm, content: str) -> None:
    look()
    cache_file().write_text(content)
    assert look().jobs["4"].state is JobState.RUNNING
    assert len(slurm.calls()) == 2


def test_a_cache_that_cannot_be_written_is_none(
    slurm: Slurm, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    assert look().jobs["4"].state is JobState.RUNNING
    assert look().problem is None
    assert len(slurm.calls()) == 2


def test_each_cluster_has_a_view_of_its_own(slurm: Slurm, monkeypatch: pytest.MonkeyPatch) -> None:
    look()
    monkeypatch.setenv("SLURM_CONF", "/etc/another.conf")
    look()
    assert len(slurm.calls()) == 2


def test_only_its_owner_can_read_it(slurm: Slurm) -> None:
    look()
    assert cache_file().parent.stat().st_mode & 0o077 == 0


def test_an_empty_answer_is_no_end_of_what_was_active(slurm: Slurm, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("time.sleep", lambda seconds: None)
    assert look().jobs["4"].state is JobState.RUNNING
    slurm.works("")
    seen = look(not_before=time.time())
    assert seen.jobs["4"].state is JobState.RUNNING, "as Slurm said last"
    assert seen.problem is not None
    slurm._write("squeue", "echo slurm_load_jobs error: Invalid job id specified >&2; exit 1")
    age(3600)
    assert "4" not in look(not_before=time.time()).jobs
