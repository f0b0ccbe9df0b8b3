"""What `zslurm submit` prints of a submission: first the facts, then the notes, one line each."""

from __future__ import annotations

from typing import Any

import pytest

from tests.cli.commands import Shell
from zslurm.cli.run import submission
from zslurm.run.run_dir import RunDir
from zslurm.submit.submit import Submission


def test_facts_come_before_notes(shell: Shell, monkeypatch: pytest.MonkeyPatch) -> None:
    run = RunDir(shell.directory / "runs" / "tiny")

    def submit(spec: Any, *, new: bool) -> Submission:
        return Submission("7", run, continued=True, changed=["optim.clip_norm: 1 -> 2"], notes=["one", "two"])

    monkeypatch.setattr(submission, "submit", submit)
    done = shell.zslurm.ok("submit", shell.write_run(), "--cluster", "local")
    assert done.stderr.splitlines() == [
        f"continued tiny as job 7; run directory {run.path}",
        "follow it with: zslurm logs -f tiny    state: zslurm status tiny",
        "changed: optim.clip_norm: 1 -> 2",
        "note: one",
        "note: two",
    ]
