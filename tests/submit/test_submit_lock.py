"""Two submissions of one run never happen at once, and a dead one does not block the next."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from zslurm.checkpoint_tools import acquire, holder_of
from zslurm.core.errors import ConfigError, RunActive
from zslurm.run.run_dir import RunDir
from zslurm.submit.submit_lock import lock_dir, submit_lock


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    return RunDir(tmp_path / "runs" / "tiny")


def test_while_one_submits_another_is_refused_with_the_process(run: RunDir) -> None:
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


def test_a_submission_that_was_killed_does_not_block_the_next(run: RunDir) -> None:
    program = """
import os, sys
from pathlib import Path
from zslurm.run.run_dir import RunDir
from zslurm.submit.submit_lock import submit_lock
with submit_lock(RunDir(Path(sys.argv[1]))):
    os.kill(os.getpid(), 9)
"""
    assert subprocess.run([sys.executable, "-c", program, str(run.path)], check=False).returncode == -9
    assert (lock_dir(run) / ".lock").exists()
    with submit_lock(run):
        holder = holder_of(lock_dir(run))
        assert holder is not None
        assert holder.pid == os.getpid()
    assert list(run.path.parent.iterdir()) == []


def test_of_a_submission_on_another_machine_the_message_names_the_file(run: RunDir) -> None:
    path = acquire(lock_dir(run)).path
    path.write_text(json.dumps(json.loads(path.read_text()) | {"host": "another-host", "pid": 1}))
    with pytest.raises(RunActive, match=f"process 1 on another-host .* remove {lock_dir(run)}$"), submit_lock(run):
        pass


def test_a_directory_that_the_last_holder_removes_at_the_wrong_moment_is_made_again(run: RunDir) -> None:
    """Many take turns: each removes the directory when it is done, while the next ones are about to use it."""
    program = """
import sys
from pathlib import Path
from zslurm.core.errors import RunActive
from zslurm.run.run_dir import RunDir
from zslurm.submit.submit_lock import submit_lock
run, held = RunDir(Path(sys.argv[1])), 0
while held < 100:
    try:
        with submit_lock(run):
            run.path.with_name("inside").touch(exist_ok=False)
            run.path.with_name("inside").unlink()
            held += 1
    except RunActive:
        pass
"""
    run.path.parent.mkdir()
    processes = [subprocess.Popen([sys.executable, "-c", program, str(run.path)]) for _ in range(3)]
    assert [process.wait() for process in processes] == [0, 0, 0]
    assert list(run.path.parent.iterdir()) == []


def test_a_place_that_cannot_hold_runs_is_a_mistake_of_the_configuration(tmp_path: Path) -> None:
    (tmp_path / "runs").write_text("a file")
    with (
        pytest.raises(ConfigError, match=r"set run\.runs_dir to a directory"),
        submit_lock(RunDir(tmp_path / "runs" / "tiny")),
    ):
        pass
