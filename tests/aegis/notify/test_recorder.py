"""Events are never lost: what a full disk refuses is written once there is space."""

from __future__ import annotations

import errno
import io
import sys
from pathlib import Path
from typing import Any

import pytest

from zslurm.aegis.notify.recorder import Recorder
from zslurm.run.events import AgentsUnavailable, AttemptStarted, FaultDetected, StartPostponed
from zslurm.run.run_dir import RunDir
from zslurm.train.jsonl import JsonLinesWriter, read_jsonl


def test_what_a_full_disk_refuses_is_written_later_and_in_order(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, full = JsonLinesWriter.append, [False]

    def append(self: JsonLinesWriter, record: dict[str, Any]) -> None:
        if full[0]:
            raise OSError(errno.ENOSPC, "No space left on device")
        real(self, record)

    monkeypatch.setattr(JsonLinesWriter, "append", append)
    with Recorder(RunDir(tmp_path)) as recorder:
        recorder.record(AttemptStarted(attempt=1))
        full[0] = True
        recorder.record(StartPostponed(reason="disk"))
        recorder.record(AgentsUnavailable(reason="third"))
        full[0] = False
        recorder.record(FaultDetected(kind="rank_killed"))
    rows = list(read_jsonl(tmp_path / "events.jsonl"))
    written = ["attempt_started", "start_postponed", "agents_unavailable", "fault_detected"]
    assert [row["event"] for row in rows] == written
    assert rows[3]["kind"] == "rank_killed"


class FullDisk(io.StringIO):
    def write(self, text: str) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")


def test_a_full_log_of_the_job_costs_no_event(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with Recorder(RunDir(tmp_path)) as recorder:
        monkeypatch.setattr(sys, "stdout", FullDisk())
        recorder.record(AttemptStarted(attempt=1))
        recorder.record(AttemptStarted(attempt=2))
        monkeypatch.undo()
    assert [row["attempt"] for row in read_jsonl(tmp_path / "events.jsonl")] == [1, 2]
