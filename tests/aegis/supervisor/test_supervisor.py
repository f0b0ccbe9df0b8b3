"""The supervisor against real ranks: whatever is killed, the run continues or ends with its true cause."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from tests import forked
from tests.slurm.recordings.scripts import Calls
from tests.submit.local_runs import LocalUser
from tests.waiting import DEADLINE_S, wait_for
from zslurm.config.load import load_spec
from zslurm.core.processes import ProcessRecord
from zslurm.run.events import Submitted
from zslurm.submit.resolve import resolve_run
from zslurm.submit.submit import record_action
from zslurm.train.jsonl import read_jsonl
from zslurm.train.progress import Phase, read_progress

ENDS_AT_ONCE = {"mode": "off"}
"""What a run does after a failure is told in test_recovery.py."""


@pytest.fixture
def user(tmp_path: Path) -> Iterator[LocalUser]:
    person = LocalUser(tmp_path)
    yield person
    person.close()


def _outcome(user: LocalUser, run: str) -> dict[str, Any]:
    """The one outcome on the run's one attempt."""
    (event,) = user.events(run, "attempt_ended")
    return event


def test_a_killed_rank_is_named_and_its_peers_are_ended(user: LocalUser) -> None:
    user.zslurm("submit", user.write_run("killed", ranks=2, aegis=ENDS_AT_ONCE))
    user.wait_for_step("killed", 2)
    user.rank(1).kill()
    state = user.wait_for_end("killed")
    assert (state["state"], state["exit_code"]) == ("failed", 137)
    assert (state["cause"]["rank"], state["cause"]["message"]) == (1, "Killed")
    assert state["cause"]["node"] == os.uname().nodename
    assert _outcome(user, "killed")["cause"] == state["cause"]
    assert f"rank 1 on {os.uname().nodename}: Killed" in user.zslurm("status", "killed").stdout
    assert "launcher" in {fault["source"] for fault in user.events("killed", "fault_detected")}
    assert "srun" not in user.run_dir("killed").events.read_text(), "this run is none of Slurm's"
    assert not user.run_dir("killed").attempt(1).progress({}).exists(), "nothing is left in the node's memory"


def test_a_killed_supervisor_is_replaced_and_costs_the_run_nothing(user: LocalUser) -> None:
    user.zslurm("submit", user.write_run("survives", steps=600))
    user.wait_for_step("survives", 2)
    user.supervisor().kill()
    assert user.wait_for_end("survives")["state"] == "completed"
    assert [row["step"] for row in user.steps("survives")] == list(range(1, 601))
    assert {row["attempt"] for row in user.steps("survives")} == {1}
    assert [event.get("adopted") for event in user.events("survives", "supervisor_started")] == [None, 1]
    assert _outcome(user, "survives")["outcome"] == "completed"


def test_a_step_that_died_with_its_supervisor_is_recorded(user: LocalUser) -> None:
    """Of the step the process is killed that would have left an exit code; its rank must not train on unseen."""
    user.zslurm("submit", user.write_run("both", aegis=ENDS_AT_ONCE))
    user.wait_for_step("both", 2)
    script = user.process("/bin/bash", "script.sh")
    script.suspend()  # so that nobody replaces the supervisor before the step is dead
    user.supervisor().kill()
    user.process("zslurm-step").kill()
    assert user.rank(0).is_running()
    script.resume()
    state = user.wait_for_end("both")
    assert (state["state"], state["exit_code"]) == ("failed", 137)
    assert _outcome(user, "both")["outcome"] == "failed"


def test_ranks_whose_supervisor_cannot_come_back_still_count_and_can_be_stopped(user: LocalUser) -> None:
    run_file = user.write_run("orphaned")
    user.zslurm("submit", run_file)
    user.wait_for_step("orphaned", 2)
    for process in (
        user.process("submitit.local._local"), user.process("/bin/bash", "script.sh"), user.supervisor(),
    ):  # fmt: skip
        process.kill()
    assert user.state("orphaned")["state"] == "running"
    assert "the run is running" in user.zslurm("submit", run_file, exit_code=1).stderr
    user.zslurm("cancel", "orphaned", "--wait")
    assert user.wait_for_end("orphaned")["state"] == "cancelled"
    assert user.steps("orphaned")[-1]["step"] == user.state("orphaned")["checkpoint_step"]


def test_a_users_mistake_reaches_every_place_where_one_looks_for_it(user: LocalUser) -> None:
    """Data that is replaced between submission and start: the rank's own words and its real exit code."""
    garbage = f"echo garbage > {user.data}"
    run_file = user.write_run("broken", ranks=2, trainer="real", cluster={"setup": [garbage]})
    done = user.zslurm("submit", run_file, "--wait", exit_code=1)
    state = user.wait_for_end("broken")
    cause = state["cause"]
    assert (state["state"], state["exit_code"], cause["exit_code"]) == ("failed", 2, 2)
    assert cause["message"].startswith(f"DataError: data.path: {user.data}: ")
    assert cause["rank"] in (0, 1)
    assert _outcome(user, "broken")["cause"] == cause
    assert cause["message"] in done.stderr
    assert cause["message"] in user.zslurm("status", "broken").stdout
    assert user.zslurm("logs", "broken", "--rank", str(cause["rank"])).stdout.startswith("error: ")


def test_ranks_that_do_not_stop_in_time_are_killed(user: LocalUser) -> None:
    soon: dict[str, Any] = {"trainer_section": {"stop_s": 0.4}, "aegis": {"save_s": 0.5}}
    user.zslurm("submit", user.write_run("deaf", ranks=2, forks=False, **soon))
    user.wait_for_step("deaf", 2)
    user.watcher(1).suspend()  # which would else end its program after trainer.stop_s
    user.zslurm("cancel", "deaf", "--wait")
    state = user.wait_for_end("deaf")
    assert (state["state"], state["exit_code"]) == ("failed", 137)
    asked = "when asked to (SIGTERM)"
    assert state["cause"]["message"] == f"the ranks did not save and stop within 0.5 s (aegis.save_s) {asked}"
    (killed,) = user.events("deaf", "step_killed")
    assert killed["reason"] == state["cause"]["message"]


def test_the_request_to_stop_is_repeated_until_the_ranks_listen(user: LocalUser) -> None:
    """A rank whose Python is slow to start is deaf at first; here it waits for a gate to open."""
    gate, site = user.directory / "gate", user.directory / "site"
    site.mkdir()
    (site / "sitecustomize.py").write_text(
        f"""
import os, sys, time
while "zslurm.job.program.rank" in sys.orig_argv and not os.path.exists({str(gate)!r}):
    time.sleep(0.01)
"""
    )
    user.zslurm("submit", user.write_run("slow", cluster={"env": {"PYTHONPATH": str(site)}}))
    wait_for(lambda: user.events("slow", "attempt_started"), "the rank to be started")
    user.zslurm("cancel", "slow")
    wait_for(lambda: user.events("slow", "signal"), "the first request")
    gate.touch()
    state = user.wait_for_end("slow")
    assert (state["state"], state["exit_code"]) == ("cancelled", 75)


def test_ranks_show_their_progress_while_they_run(user: LocalUser) -> None:
    user.zslurm("submit", user.write_run("seen", ranks=2, forks=False))
    user.wait_for_step("seen", 2)
    (folder,) = {path.parent for rank in range(2) for path in _progress_records(user.watcher(rank).pid)}
    for number in range(2):
        process = user.rank(number)
        record = read_progress(folder, number)
        assert record is not None
        assert (record.attempt, record.rank, record.pid, record.phase) == (1, number, process.pid, Phase.STEP)
    assert folder.stat().st_mode & 0o777 == 0o700
    user.zslurm("cancel", "seen", "--wait")
    assert not folder.exists()


def _progress_records(pid: int) -> list[Path]:
    links = []
    for path in Path(f"/proc/{pid}/fd").iterdir():
        with suppress(FileNotFoundError):  # it trains: files come and go
            links.append(path.readlink())
    return [link for link in links if link.name.startswith("rank-") and link.suffix == ""]


def _supervise(user: LocalUser, run: str, **variables: str) -> subprocess.CompletedProcess[str]:
    words, environment = ["aegis", "run", str(user.run_dir(run).path)], user.environment | variables
    return forked.server().run(words, env=environment, cwd=user.directory, timeout=DEADLINE_S)


@pytest.fixture
def prepared(user: LocalUser) -> LocalUser:
    """A user with a prepared run `quick`, on which a supervisor may be started by hand."""
    spec = resolve_run(user.write_run("quick"), cluster="local").spec
    user.run_dir("quick").create(group_readable=False)
    user.run_dir("quick").config.write_text(spec.model_dump_json())
    return user


def test_a_stop_that_came_before_the_supervisor_starts_no_ranks(prepared: LocalUser) -> None:
    """The batch script was signalled while the first supervisor was still starting."""
    done = _supervise(prepared, "quick", ZSLURM_JOB_ID="local-9", ZSLURM_STOP="USR2")
    assert done.returncode == 75, done.stderr
    assert not prepared.run_dir("quick").attempt_dirs()
    events = list(read_jsonl(prepared.run_dir("quick").events))
    assert [event["event"] for event in events] == ["supervisor_started", "signal", "run_ended"]
    assert (events[-1]["outcome"], events[-1]["exit_code"]) == ("interrupted", 75)


def test_the_last_word_waits_for_a_disk_that_takes_no_files(prepared: LocalUser) -> None:
    """Here a directory stands in the way for a while."""
    run = prepared.run_dir("quick")
    over = run.job_exit("local-9")
    over.mkdir()
    supervisor = subprocess.Popen(
        [sys.executable, "-m", "zslurm", "aegis", "run", str(run.path)],
        env=prepared.environment | {"ZSLURM_JOB_ID": "local-9", "ZSLURM_STOP": "USR2"},
    )
    wait_for(lambda: prepared.events("quick", "run_ended"), "the run to end")
    over.rmdir()
    assert supervisor.wait(DEADLINE_S) == 75
    assert over.read_text() == "75\n"


@pytest.mark.parametrize(
    ("action", "mode", "outcome", "exit_code"),
    [("finish", "act", "interrupted", 75), ("stop", "act", "failed", 93), ("restart", "observe", "failed", 137)],
)
def test_what_was_decided_before_the_supervisor_died_still_holds(
    prepared: LocalUser, action: str, mode: str, outcome: str, exit_code: int
) -> None:
    """It was killed between its decision and its last word: its successor starts no ranks."""
    run = prepared.run_dir("quick")
    spec = resolve_run(prepared.write_run("quick", aegis={"mode": mode}), cluster="local").spec
    run.config.write_text(spec.model_dump_json())
    attempt = run.attempt(1)
    attempt.path.mkdir(parents=True)
    attempt.description.write_text(json.dumps({"attempt": 1, "job_id": "local-9", "restart": 0, "nodes": "here"}))
    code = 75 if action == "finish" else 137
    ended = {
        "outcome": "interrupted" if code == 75 else "failed",
        "exit_code": code,
        "cause": {"message": "Killed"},
    }
    rows: list[dict[str, Any]] = [
        {"time": 1.0, "event": "attempt_ended", "attempt": 1, **ended},
        {"time": 1.0, "event": "decision", "attempt": 1, "mode": mode, "action": action, "reason": "so"},
    ]
    run.events.write_text("".join(json.dumps(row) + "\n" for row in rows))
    done = _supervise(prepared, "quick", ZSLURM_JOB_ID="local-9")
    assert done.returncode == exit_code, done.stderr
    assert [path.number for path in run.attempt_dirs()] == [1]
    assert (last := list(read_jsonl(run.events))[-1])["event"] == "run_ended"
    assert (last["outcome"], last["exit_code"], last["cause"]["message"]) == (outcome, exit_code, "Killed")


def test_a_supervisor_that_another_one_has_replaced_ends_without_any_action(prepared: LocalUser) -> None:
    """As one whose host Slurm cannot reach, while the job has been requeued elsewhere."""
    run = prepared.run_dir("quick")
    supervisor = subprocess.Popen(
        [sys.executable, "-m", "zslurm", "aegis", "run", str(run.path)],
        env=prepared.environment | {"ZSLURM_JOB_ID": "local-9"},
    )
    wait_for(lambda: prepared.events("quick", "attempt_started"), "ranks to start")
    ProcessRecord.of(os.getpid()).write(run.supervisor)
    assert supervisor.wait(DEADLINE_S) == 93
    last = list(read_jsonl(run.events))[-1]
    assert (last["event"], run.job_exit("local-9").exists()) == ("lease_lost", False)
    assert not prepared.events("quick", "decision")
    assert ProcessRecord.read(run.supervisor) == ProcessRecord.of(os.getpid())


def test_a_successor_without_work_leaves_the_run_to_its_supervisor(prepared: LocalUser) -> None:
    """The run was submitted again, and its present job is watched by another process."""
    run = prepared.run_dir("quick")
    record_action(run, Submitted(job_id="local-9"), load_spec(run.config))
    ProcessRecord.of(os.getpid()).write(run.supervisor)
    done = _supervise(prepared, "quick", ZSLURM_JOB_ID="local-8", ZSLURM_SUCCESSOR_OF="local-7")
    assert done.returncode == 0, done.stderr
    assert [event["event"] for event in read_jsonl(run.events)] == ["successor_ended"]
    assert ProcessRecord.read(run.supervisor) == ProcessRecord.of(os.getpid())


def test_a_supervisor_outside_of_a_job_says_so(prepared: LocalUser) -> None:
    done = _supervise(prepared, "quick")
    assert done.returncode == 2
    assert "not inside a job: ZSLURM_JOB_ID is not set" in done.stderr
    assert "Traceback" not in done.stderr


def test_a_second_signal_does_not_hurry_the_save(user: LocalUser) -> None:
    user.zslurm("submit", user.write_run("patient"))
    user.wait_for_step("patient", 2)
    supervisor = user.supervisor()
    for signum in (signal.SIGTERM, signal.SIGUSR2, signal.SIGINT, signal.SIGHUP):
        supervisor.send_signal(signum)
    state = user.wait_for_end("patient")
    assert (state["state"], state["exit_code"]) == ("interrupted", 75)
    assert state["checkpoint_step"] == state["step"]
    wait_for(lambda: len(user.events("patient", "signal")) == 1, "one request to be recorded")


# --- asked to stop while no ranks run: in a job of Slurm ---------------------------------------------------------


@pytest.fixture
def in_slurm(prepared: LocalUser, tmp_path: Path) -> Calls:
    """The run `quick` in job 12; of Slurm there are only squeue and scontrol."""
    run = prepared.run_dir("quick")
    spec = resolve_run(prepared.write_run("quick", aegis={"comment": False}), cluster="local").spec
    body = spec.model_dump(mode="json")
    body["cluster"]["launcher"] = "slurm"
    run.config.write_text(json.dumps(body))
    commands = tmp_path / "commands"
    commands.mkdir()
    prepared.environment |= {
        "SLURM_JOB_ID": "12", "SLURM_JOB_NODELIST": "node0", "PATH": f"{commands}:/usr/bin:/bin",
    }  # fmt: skip
    return Calls(commands)


def _wants_to_start_again(user: LocalUser, **how: Any) -> None:
    """A supervisor decided so after the first attempt, and died."""
    run = user.run_dir("quick")
    attempt = run.attempt(1)
    attempt.path.mkdir(parents=True)
    attempt.description.write_text(json.dumps({"attempt": 1, "job_id": "12", "restart": 0, "nodes": "node0"}))
    ended = {"outcome": "failed", "exit_code": 1, "cause": {"message": "No space left on device"}}
    again = {"mode": "act", "action": "restart", "reason": "so", "nodes": ["node0"], **how}
    rows: list[dict[str, Any]] = [
        {"time": 1.0, "event": "attempt_ended", "attempt": 1, **ended},
        {"time": 1.0, "event": "decision", "attempt": 1, **again},
    ]
    run.events.write_text("".join(json.dumps(row) + "\n" for row in rows))


def _last_events(user: LocalUser) -> list[str]:
    return [row["event"] for row in read_jsonl(user.run_dir("quick").events)][-4:]


REQUEUED = ["signal", "decision", "requeued", "run_ended"]


def test_the_time_limit_before_the_first_attempt_requeues(prepared: LocalUser, in_slurm: Calls) -> None:
    done = _supervise(prepared, "quick", ZSLURM_STOP="USR2")
    assert done.returncode == 75, done.stderr
    assert in_slurm.made == ["requeue 12"]
    assert _last_events(prepared) == REQUEUED
    assert not prepared.run_dir("quick").attempt_dirs()


def test_the_time_limit_after_the_decision_to_start_again_requeues(prepared: LocalUser, in_slurm: Calls) -> None:
    _wants_to_start_again(prepared)
    done = _supervise(prepared, "quick", ZSLURM_STOP="USR2")
    assert done.returncode == 75, done.stderr
    assert in_slurm.made == ["requeue 12"]
    assert _last_events(prepared) == REQUEUED


@pytest.mark.parametrize(
    ("signum", "made"),
    [(signal.SIGUSR2, ["requeue 12"]), (signal.SIGTERM, [])],
    ids=["time limit", "cancelled"],
)
def test_a_signal_while_a_full_disk_is_waited_for(
    prepared: LocalUser, in_slurm: Calls, signum: signal.Signals, made: list[str]
) -> None:
    _wants_to_start_again(prepared, wait_s=3600.0)
    supervisor = subprocess.Popen(
        [sys.executable, "-m", "zslurm", "aegis", "run", str(prepared.run_dir("quick").path)],
        env=prepared.environment,
    )
    wait_for(lambda: prepared.events("quick", "supervisor_started"), "the supervisor to wait")
    supervisor.send_signal(signum)
    supervisor.wait(DEADLINE_S)
    assert in_slurm.made == made
    assert (_last_events(prepared) == REQUEUED) is bool(made)
    (end,) = prepared.events("quick", "run_ended")
    message = f"asked to stop ({signum.name}) while it recovered from a failure: No space left on device"
    assert (end["outcome"], end["exit_code"], end["cause"]) == ("interrupted", 75, {"message": message})
