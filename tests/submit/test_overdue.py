"""A run that waits in the queue for too long notifies once, from whatever command notices first."""

from __future__ import annotations

import json
import time
from pathlib import Path

from tests.submit.specs import run_spec
from zslurm.run.run_dir import RunDir
from zslurm.submit.overdue import notify_all_overdue, notify_overdue
from zslurm.train.jsonl import read_jsonl


def waiting_run(tmp_path: Path, command: str, *, waited_s: float) -> RunDir:
    """A run that Slurm was expected to start at once."""
    spec = run_spec(tmp_path, aegis={"notify": {"command": command}})
    run = RunDir(tmp_path / "runs" / "tiny")
    run.create(group_readable=False)
    run.config.write_text(spec.model_dump_json())
    since = time.time() - waited_s
    row = {"time": since, "action": "submit", "user": "ann", "job_id": "7", "expected_start": since}
    run.submissions.write_text(json.dumps(row) + "\n")
    return run


def test_the_hook_is_told_once_for_a_wait(tmp_path: Path) -> None:
    run = waiting_run(tmp_path, f"cat >> {tmp_path}/told", waited_s=7200)
    assert [notify_overdue(run, "7") for _ in range(2)] == ["", ""]
    (told,) = read_jsonl(tmp_path / "told")
    assert told["words"].startswith("the job waits in the queue: for 2h 00m")
    assert [row["action"] for row in read_jsonl(run.submissions)] == ["submit", "queue_overdue"]


def test_a_run_that_waits_as_expected_tells_nobody(tmp_path: Path) -> None:
    run = waiting_run(tmp_path, f"cat >> {tmp_path}/told", waited_s=60)
    assert notify_overdue(run, "7") == ""
    assert not (tmp_path / "told").exists()


def test_a_hook_that_fails_and_a_run_that_cannot_be_read_are_no_errors(tmp_path: Path) -> None:
    run = waiting_run(tmp_path, "exit 3", waited_s=7200)
    (problem,) = notify_all_overdue({run: "7", RunDir(tmp_path / "gone"): "8"})
    assert problem.startswith("tiny: aegis.notify.command: ")
