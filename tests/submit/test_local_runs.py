"""Whole runs on this machine, from submission to their end, through the command line alone."""

from __future__ import annotations

import os
import re
import shlex
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.submit.local_runs import LocalUser, in_a_terminal
from tests.waiting import DEADLINE_S, wait_for

STEPS = 400
"""Enough for a run to be under way still when a test that saw it begin does something to it."""


@pytest.fixture
def user(tmp_path: Path) -> Iterator[LocalUser]:
    person = LocalUser(tmp_path)
    yield person
    person.close()


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalUser]:
    """A user with a run `whole`, submitted from a terminal that was closed while the run was under way."""
    person = LocalUser(tmp_path_factory.mktemp("finished"))
    submit = shlex.join(person.command("submit", person.write_run("whole", steps=STEPS)))
    shell, terminal = in_a_terminal(
        ["/bin/sh", "-c", f"{submit}; exec sleep 1000"], person.environment, person.directory
    )
    # Its script is there before its job is recorded: a terminal closed between the two would end the command.
    run = person.run_dir("whole")
    wait_for(lambda: run.submitted and person.state("whole")["job_id"], "the run to be submitted")
    os.close(terminal)
    assert shell.wait(timeout=DEADLINE_S) == -signal.SIGHUP
    person.wait_for_end("whole")
    yield person
    person.close()


def test_a_run_outlives_the_terminal_that_it_was_submitted_from(finished: LocalUser) -> None:
    state = finished.state("whole")
    assert (state["state"], state["job_id"], state["launcher"]) == ("completed", "local-1", "local")
    assert (state["step"], state["checkpoint_step"], state["attempt"]) == (STEPS, STEPS, 1)
    assert (state["exit_code"], state["cause"]) == (0, None)
    assert [row["step"] for row in finished.steps("whole")] == list(range(1, STEPS + 1))
    (ended,) = finished.events("whole", "run_ended")
    assert (ended["outcome"], ended["exit_code"]) == ("completed", 0)


def test_its_files_are_closed_to_others(finished: LocalUser) -> None:
    assert finished.run_dir("whole").path.stat().st_mode & 0o777 == 0o700


def test_its_logs_can_be_read(finished: LocalUser) -> None:
    assert f"step {STEPS}/{STEPS} loss" in finished.zslurm("logs", "whole").stdout
    assert finished.zslurm("logs", "whole", "-n", "1").stdout == f"completed {STEPS} steps\n"
    assert "supervisor: run_ended" in finished.zslurm("logs", "local-1", "--supervisor").stdout
    assert "ranks 0 to 0, not 1" in finished.zslurm("logs", "whole", "--rank", "1", exit_code=3).stderr


def test_ctrl_c_saves_and_stops_and_submitting_again_continues_bit_exactly(
    finished: LocalUser, user: LocalUser
) -> None:
    run_file = user.write_run("whole", steps=STEPS)
    first = user.start("submit", run_file, "--wait")
    assert first.stderr is not None
    assert first.stderr.readline().startswith("submitted whole as job local-1; run directory ")
    assert first.stderr.readline().startswith("note: trainer.progress: ")
    assert re.match(rf"whole: step \d+/{STEPS}  loss [34]\.", first.stderr.readline())
    first.send_signal(signal.SIGINT)
    _, messages = first.communicate(timeout=300)
    assert first.returncode == 75, messages
    stopped_at = user.steps("whole")[-1]["step"]
    assert stopped_at < STEPS
    assert "whole: stopping: it saves first" in messages
    assert f"whole: stopped; saved at step {stopped_at}; submit again to continue" in messages
    assert user.state("whole")["state"] == "cancelled"
    assert not user.processes()

    second = user.zslurm("submit", run_file, "--wait")
    assert second.stderr.splitlines()[0].startswith("continued whole as job local-2")
    assert f"whole: saved step {STEPS}" in second.stderr
    assert f"whole: completed {STEPS} steps" in second.stderr
    assert second.stdout == ""
    assert [row["loss"] for row in user.steps("whole")] == [row["loss"] for row in finished.steps("whole")]
    assert {row["attempt"] for row in user.steps("whole")} == {1, 2}


def test_an_active_run_is_refused_requeued_and_cancelled(user: LocalUser) -> None:
    run_file = user.write_run("busy")
    assert user.zslurm("submit", "-q", run_file).stdout == "local-1\n"
    user.wait_for_step("busy", 2)
    refused = user.zslurm("submit", run_file, exit_code=1)
    assert refused.stderr.startswith(
        "zslurm: busy: the run is running as job local-1; `zslurm cancel busy --wait` first"
    )
    assert "the run is running" in user.zslurm("submit", run_file, "--new", exit_code=1).stderr

    assert user.zslurm("requeue", "busy").stderr == "requeued busy as job local-2\n"
    user.wait_for_step("busy", 1, attempt=2)
    assert (user.state("busy")["state"], user.state("busy")["job_id"]) == ("running", "local-2")
    assert user.zslurm("cancel", "busy", "--wait").stderr == "cancelled job local-2 of busy\n"
    state = user.wait_for_end("busy")
    assert state["state"] == "cancelled"
    assert state["checkpoint_step"] == state["step"]
    steps = [row["step"] for row in user.steps("busy")]
    assert steps == list(range(1, len(steps) + 1)), "no step was lost or repeated"
    assert user.zslurm("cancel", "busy").stderr == "busy is not active; nothing to cancel\n"


def test_of_two_submissions_at_once_one_wins_and_may_be_cancelled_at_once(user: LocalUser) -> None:
    run_file = user.write_run("twice")
    submissions = [user.start("submit", run_file) for _ in range(3)]
    messages = [process.communicate(timeout=300)[1] for process in submissions]
    assert sorted(process.returncode for process in submissions) == [0, 1, 1]
    for process, message in zip(submissions, messages, strict=True):
        if process.returncode:
            assert "is submitting the run at this moment" in message or "the run is running as job" in message
    user.zslurm("cancel", "twice", "--wait")
    state = user.wait_for_end("twice")
    assert (state["state"], state["exit_code"], state["cause"]) == ("cancelled", 75, None)
    assert len(user.events("twice", "run_ended")) == 1


def test_files_of_the_working_directory_with_names_of_modules_are_not_imported(user: LocalUser) -> None:
    for name in ("json", "queue", "train", "kernels"):
        (user.directory / f"{name}.py").write_text("raise SystemExit('a file of the user was imported')\n")
    python, *words = user.command("submit", user.write_run("shadowed", steps=2))
    environment = {name: value for name, value in user.environment.items() if name != "PYTHONSAFEPATH"}
    subprocess.run([python, "-P", *words], cwd=user.directory, env=environment, check=True)
    assert user.wait_for_end("shadowed")["state"] == "completed"
