"""Two submissions of one run never happen at once, and a dead one is in nobody's way."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.run.stories import Holder
from zslurm.core.errors import ConfigError, RunActive
from zslurm.core.processes import ProcessRecord
from zslurm.run.run_dir import RunDir
from zslurm.submit.submit_lock import lock_path, submit_lock


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    return RunDir(tmp_path / "runs" / "tiny")


def test_while_one_submits_another_is_refused_and_told_by_whom(run: RunDir) -> None:
    with submit_lock(run), pytest.raises(RunActive) as refusal, submit_lock(run):
        pass
    me = f"tiny: process {os.getpid()} on {os.uname().nodename} is submitting the run at this moment"
    assert str(refusal.value).startswith(me)
    with submit_lock(run):
        pass


def test_runs_of_other_names_do_not_wait_for_each_other(run: RunDir) -> None:
    with submit_lock(run), submit_lock(RunDir(run.path.with_name("other"))):
        pass


def test_the_lock_is_given_back_when_a_submission_fails(run: RunDir) -> None:
    with pytest.raises(ZeroDivisionError), submit_lock(run):
        raise ZeroDivisionError
    assert list(run.path.parent.iterdir()) == []


def test_a_submission_that_was_killed_is_in_nobodys_way(run: RunDir) -> None:
    program = """
import os, sys
from pathlib import Path
from zslurm.run.run_dir import RunDir
from zslurm.submit.submit_lock import submit_lock
with submit_lock(RunDir(Path(sys.argv[1]))):
    os.kill(os.getpid(), 9)
"""
    assert subprocess.run([sys.executable, "-c", program, str(run.path)], check=False).returncode == -9
    assert lock_path(run).exists()
    with submit_lock(run):
        owner = ProcessRecord.read(lock_path(run))
        assert owner is not None
        assert owner.pid == os.getpid()
    assert list(run.path.parent.iterdir()) == []


def test_a_living_submission_keeps_its_lock(run: RunDir) -> None:
    run.path.parent.mkdir()
    with Holder() as holder:
        ProcessRecord.of(holder.pid).write(lock_path(run))
        with pytest.raises(RunActive, match=f"process {holder.pid} on "), submit_lock(run):
            pass
        assert lock_path(run).exists()


@pytest.mark.parametrize("text", ['{"pid": 1, "created": 1.0, "host": "another-host"}', ""])
def test_of_a_submission_on_another_machine_the_message_names_the_file(run: RunDir, text: str) -> None:
    run.path.parent.mkdir()
    lock_path(run).write_text(text)
    with pytest.raises(RunActive, match=f"remove {lock_path(run)}$"), submit_lock(run):
        pass


def test_a_place_that_cannot_hold_runs_is_a_mistake_of_the_configuration(tmp_path: Path) -> None:
    (tmp_path / "runs").write_text("a file")
    with (
        pytest.raises(ConfigError, match=r"set run\.runs_dir to a directory"),
        submit_lock(RunDir(tmp_path / "runs" / "tiny")),
    ):
        pass
