"""Real ranks on this machine that fail: the supervisor brings the run back by itself, or stops it for good."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests import programs
from tests.submit.local_runs import LocalUser
from tests.waiting import wait_for
from zslurm.core.errors import Exit

STEPS = 60
FEW = 20
"""Of the trainer."""
MANY = 150
"""Without a save among them: a rank that is stopped in one may take much longer than in a step."""
SAVE_EVERY = 5


@pytest.fixture
def user(tmp_path: Path) -> Iterator[LocalUser]:
    person = LocalUser(tmp_path)
    yield person
    person.close()


def _curve(user: LocalUser, run: str) -> list[float]:
    """The loss of each step, as its last attempt has it."""
    return [row["loss"] for row in {row["step"]: row for row in user.steps(run)}.values()]


def _decisions(user: LocalUser, run: str) -> list[str]:
    return [event["action"] for event in user.events(run, "decision")]


def _undisturbed(user: LocalUser, ranks: int = 2) -> list[float]:
    run = user.write_run("undisturbed", steps=FEW, ranks=ranks, trainer="real", save_every=SAVE_EVERY)
    user.zslurm("submit", run, "--wait")
    return _curve(user, "undisturbed")


def test_a_killed_rank_costs_a_few_steps_and_no_human(user: LocalUser) -> None:
    saves = {"every_steps": SAVE_EVERY, "background": False}  # step 5 is saved before the next one begins
    run = user.write_run("killed", steps=FEW, ranks=2, trainer="real", pace_s=0.05, checkpoint=saves)
    user.zslurm("submit", run)
    user.wait_for_step("killed", 7)
    user.rank(1).kill()
    state = user.wait_for_end("killed")
    assert (state["state"], state["exit_code"], state["attempt"]) == ("completed", 0, 2)
    assert _decisions(user, "killed") == ["restart"]
    (decision,) = user.events("killed", "decision")
    assert (decision["root"]["kind"], decision["root"]["rank"]) == ("rank_killed", 1)
    assert decision["root"]["node"] == os.uname().nodename
    assert not user.events("killed", "nodes_excluded")
    second = [row["step"] for row in user.steps("killed") if row["attempt"] == 2]
    assert second[0] == decision["committed_step"] + 1
    assert _curve(user, "killed") == _undisturbed(user)


def test_a_rank_that_exits_once_is_started_again(user: LocalUser) -> None:
    run = user.write_run("once", "exit-1:8:0:1", steps=STEPS, ranks=2, save_every=SAVE_EVERY)
    user.zslurm("submit", run, "--wait")
    assert _decisions(user, "once") == ["restart"]
    (fault,) = [event for event in user.events("once", "fault_detected") if event["role"] == "root"]
    assert (fault["kind"], fault["rank"]) == ("rank_exit", 0)


def test_a_rank_that_hangs_is_named_and_all_stacks_are_kept(user: LocalUser) -> None:
    hang = {"setup_s": 40, "step_s": 3, "step_factor": 10}  # the first until the time of a step is known
    run = user.write_run("hangs", steps=MANY, ranks=2, forks=False, aegis={"hang": hang})
    user.zslurm("submit", run)
    user.wait_for_step("hangs", 7)
    user.rank(1).suspend()
    state = user.wait_for_end("hangs")
    assert (state["state"], state["attempt"]) == ("completed", 2)
    (decision,) = user.events("hangs", "decision")
    assert (decision["action"], decision["root"]["kind"], decision["root"]["rank"]) == ("restart", "rank_hang", 1)
    assert user.events("hangs", "stacks_dumped")
    log = user.run_dir("hangs").attempt(1).rank_log(0).read_text()
    assert "Current thread" in log and "in train\n" in log


@pytest.mark.soak
def test_a_rank_that_stopped_before_its_supervisor_was_replaced_is_found_by_the_next_one(user: LocalUser) -> None:
    """By the times of the steps before; the setup's limit is longer than this test may take."""
    hang = {"setup_s": 3600, "step_s": 3, "step_factor": 10}
    run = user.write_run("adopts", steps=MANY, ranks=2, forks=False, aegis={"hang": hang})
    user.zslurm("submit", run)
    user.wait_for_step("adopts", 7)
    user.rank(1).suspend()
    user.supervisor().kill()
    state = user.wait_for_end("adopts")
    assert (state["state"], state["attempt"]) == ("completed", 2)
    (decision,) = user.events("adopts", "decision")
    assert (decision["root"]["kind"], decision["root"]["rank"]) == ("rank_hang", 1)
    assert [event.get("adopted") for event in user.events("adopts", "supervisor_started")] == [None, 1]


def test_a_bug_that_comes_back_stops_the_run_for_good(user: LocalUser) -> None:
    run = user.write_run("bug", "raise:12:*:*", steps=STEPS, save_every=SAVE_EVERY, aegis={"retries": 1})
    user.zslurm("submit", run, "--wait", exit_code=Exit.STOPPED)
    state = user.state("bug")
    assert (state["state"], state["exit_code"]) == ("failed", Exit.STOPPED)
    assert state["cause"]["message"] == "ValueError: a matrix has the wrong shape"
    assert _decisions(user, "bug") == ["restart", "stop"]


def test_observing_changes_nothing_and_says_what_would_be_done(user: LocalUser) -> None:
    run = user.write_run("seen", steps=10_000, ranks=2, save_every=SAVE_EVERY, aegis={"mode": "observe"})
    user.zslurm("submit", run)
    user.wait_for_step("seen", 7)
    user.rank(1).kill()
    state = user.wait_for_end("seen")
    assert (state["state"], state["exit_code"], state["attempt"]) == ("failed", 137, 1)
    (decision,) = user.events("seen", "decision")
    assert (decision["action"], decision["mode"]) == ("restart", "observe")


def test_without_aegis_the_first_failure_ends_the_run(user: LocalUser) -> None:
    user.zslurm("submit", user.write_run("bare", steps=10_000, ranks=2, aegis={"mode": "off"}))
    user.wait_for_step("bare", 3)
    user.rank(0).kill()
    state = user.wait_for_end("bare")
    assert (state["state"], state["cause"]["rank"], state["attempt"]) == ("failed", 0, 1)
    assert not user.events("bare", "decision")
    assert not user.events("bare", "agents_started")


def test_nothing_of_an_attempt_is_left_when_the_next_one_starts(user: LocalUser) -> None:
    """A child of a rank, in a session of its own, as a loader that outlives its parent."""
    program = programs.command(150, "--save-every", SAVE_EVERY)
    leaves = ["sh", "-c", 'setsid sleep 1000 & exec "$@"', "sh", *program]
    run = user.write_run("orphans", steps=150, ranks=2, trainer_section={"command": leaves})
    user.zslurm("submit", run)
    user.wait_for_step("orphans", 7)
    orphans = [process for process in user.processes() if process.name() == "sleep"]
    assert len(orphans) == 2
    wait_for(lambda: user.events("orphans", "agents_started"), "the agent, which ends what is left")
    user.watcher(1).kill()  # which would else end what its program leaves
    wait_for(lambda: user.events("orphans", "attempt_cleared"), "the attempt to be cleared")
    assert not any(process.is_running() and process.status() != "zombie" for process in orphans)
    assert user.wait_for_end("orphans")["state"] == "completed"
