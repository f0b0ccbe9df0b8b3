"""Whole runs on a real Slurm, by an ordinary user, through the command line alone."""

from __future__ import annotations

import json
import os
import shutil
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.cluster.slurm_cluster import SlurmCluster
from tests.train.runs import MODEL, STEP_TOKENS, make_corpus
from tests.waiting import wait_for
from train.jsonl import read_jsonl

pytestmark = pytest.mark.slurm

STEPS = 12


class User:
    """The ordinary user at work in a directory."""

    def __init__(self, cluster: SlurmCluster, directory: Path) -> None:
        self.cluster, self.directory = cluster, directory
        make_corpus(directory / "tokens.h5")

    def write_run(self, name: str, *, steps: int = STEPS, nodes: int = 2, **sections: Any) -> Path:
        """A run file; JSON is YAML."""
        config = {
            "run": {"name": name, "seed": 3},
            "model": MODEL,
            "data": {"path": "tokens.h5"},
            "phases": [
                {
                    "tokens": steps * STEP_TOKENS,
                    "context": 16,
                    "global_batch": 6,
                    "micro_batch": 1,
                    "lr": 3e-3,
                    "warmup_steps": 2,
                }
            ],
            "parallel": {"dtype": "fp32", "threads": 1},
            "checkpoint": {"every_steps": 4},
            "aegis": {"grace_s": 3},
            "slurm": {"nodes": nodes, "ranks_per_node": 2, "time": "10:00"} | sections.pop("slurm", {}),
        }
        path = self.directory / f"{name}.yaml"
        path.write_text(json.dumps(config | sections, indent=1))
        return path

    def zslurm(self, *arguments: str | Path, check: bool = True) -> str:
        return self.cluster.zslurm(*arguments, cwd=self.directory, check=check).stdout.strip()

    def fails(self, *arguments: str | Path) -> tuple[int, str]:
        """Exit code and messages of a command that must not succeed."""
        done = self.cluster.zslurm(*arguments, cwd=self.directory, check=False)
        assert done.returncode != 0
        assert "Traceback" not in done.stderr
        return done.returncode, done.stderr

    def state(self, run: str) -> dict[str, Any]:
        (state,) = json.loads(self.zslurm("status", run, "--json"))
        return dict(state)

    def wait_for_state(self, run: str, *wanted: str) -> dict[str, Any]:
        wait_for(lambda: self.state(run)["state"] in wanted, f"{run} to be {' or '.join(wanted)}")
        return self.state(run)

    def steps(self, run: str) -> list[dict[str, Any]]:
        return [
            row for row in read_jsonl(self.directory / "runs" / run / "metrics.jsonl") if row["kind"] == "step"
        ]

    def wait_for_step(self, run: str, step: int) -> None:
        wait_for(lambda: any(row["step"] >= step for row in self.steps(run)), f"{run} to reach step {step}")

    def events(self, run: str) -> list[dict[str, Any]]:
        return list(read_jsonl(self.directory / "runs" / run / "events.jsonl"))


@pytest.fixture
def user(slurm_cluster: SlurmCluster) -> Iterator[User]:
    """The user in a fresh directory, with a profile that `zslurm init` wrote; jobs end and nodes come back."""
    directory = slurm_cluster.user_dir("runs-test")
    person = User(slurm_cluster, directory)
    person.zslurm("init", "--yes")
    yield person
    slurm_cluster.restore()
    shutil.rmtree(directory, ignore_errors=True)


def test_two_nodes_train_are_requeued_and_continue(user: User) -> None:
    """The main job: submit, train, requeue in mid-run, continue from the checkpoint, complete."""
    job_id = user.zslurm("submit", "-q", user.write_run("main", steps=400))
    assert job_id.isdigit()
    user.wait_for_step("main", 4)
    state = user.state("main")
    assert (state["state"], state["job_id"], state["nodes"]) == ("running", job_id, "node[0-1]")
    assert "step 1/400 loss" in user.zslurm("logs", "main")

    user.zslurm("requeue", "main", "--now")
    state = user.state("main")
    assert (state["state"], state["job_id"], state["restarts"]) == ("requeued", job_id, 1)
    stopped_at = user.steps("main")[-1]["step"]
    assert stopped_at < 400
    user.wait_for_step("main", stopped_at + 4)
    second = [row for row in user.steps("main") if row["attempt"] == 2]
    assert second[0]["step"] == stopped_at + 1, "it saved when it was asked to stop, and lost no step"

    user.zslurm("cancel", "main", "--wait")
    assert user.state("main")["state"] == "cancelled"
    outcomes = [event["outcome"] for event in user.events("main") if event["event"] == "attempt_ended"]
    assert outcomes == ["interrupted", "interrupted"]


def test_it_completes_and_equals_a_local_run(user: User) -> None:
    run_file = user.write_run("complete", nodes=2)
    user.zslurm("submit", run_file)
    state = user.wait_for_state("complete", "completed", "failed")
    assert state["state"] == "completed", state
    assert (state["step"], state["checkpoint_step"], state["exit_code"]) == (STEPS, STEPS, 0)
    local = user.cluster.zslurm(
        "submit", run_file, "--cluster", "local", "--set", "run.name=local", "--set", "slurm.ranks_per_node=4",
        "--nodes", "1", "--wait", cwd=user.directory,
    )  # fmt: skip
    assert "local: completed 12 steps" in local.stderr
    assert [row["loss"] for row in user.steps("complete")] == [row["loss"] for row in user.steps("local")]


def test_pending_then_cancelled(user: User) -> None:
    user.zslurm("submit", user.write_run("waits", slurm={"flags": {"begin": "now+1hour"}}))
    state = user.state("waits")
    assert (state["state"], state["reason"]) == ("pending", "BeginTime")
    user.zslurm("cancel", "waits")
    assert user.wait_for_state("waits", "cancelled")["active"] is False


def test_an_active_run_is_not_submitted_again(user: User) -> None:
    run_file = user.write_run("busy", slurm={"flags": {"begin": "now+1hour"}})
    user.zslurm("submit", run_file)
    code, message = user.fails("submit", run_file)
    assert code == 1
    assert "busy: the run is pending as job" in message


def test_a_users_bug_fails_the_run_with_its_cause(user: User) -> None:
    """A rank that raises: the real exit code, the rank, its node and its error reach status and Slurm."""
    broken = user.write_run("broken", parallel={"dtype": "fp32", "threads": 1, "device": "cuda"})
    job_id = user.zslurm("submit", "-q", broken)
    state = user.wait_for_state("broken", "failed", "completed")
    assert state["state"] == "failed"
    assert state["exit_code"] == 2
    assert "parallel.device: cuda" in state["cause"]["message"]
    assert state["cause"]["node"].startswith("node")
    record = user.cluster.run(["scontrol", "show", "job", job_id]).stdout
    assert "ExitCode=2:0" in record
    assert "parallel.device: cuda" in user.zslurm("status", "broken")


def test_a_killed_rank_is_named(user: User) -> None:
    """Peers of a dead rank fail too; the one that died first gets the blame."""
    user.zslurm("submit", user.write_run("killed", steps=4000))
    user.wait_for_step("killed", 2)
    victim = _rank_process(user, "killed", rank=3)
    victim.kill()
    state = user.wait_for_state("killed", "failed")
    assert state["exit_code"] == 137
    assert (state["cause"]["rank"], state["cause"]["node"]) == (3, "node1")
    assert state["cause"]["message"] == "Killed"


def test_a_killed_supervisor_is_replaced_and_costs_nothing(user: User) -> None:
    user.zslurm("submit", user.write_run("survives", steps=120))
    user.wait_for_step("survives", 2)
    supervisor = json.loads((user.directory / "runs" / "survives" / "supervisor.json").read_text())
    os.kill(supervisor["pid"], signal.SIGKILL)
    state = user.wait_for_state("survives", "completed", "failed")
    assert state["state"] == "completed", user.zslurm("logs", "survives", "--supervisor")
    assert {row["attempt"] for row in user.steps("survives")} == {1}, "the ranks trained on meanwhile"
    starts = [event for event in user.events("survives") if event["event"] == "supervisor_started"]
    assert [event.get("adopted") for event in starts] == [None, 1]


def test_a_dead_node_requeues_the_job(user: User) -> None:
    user.zslurm("submit", user.write_run("bereft", steps=4000))
    user.wait_for_step("bereft", 5)
    user.cluster.kill_node("node1", noticed_at_once=True)
    user.wait_for_state("bereft", "requeued", "node-failed")
    assert user.state("bereft")["state"] == "requeued", "the template asks for --requeue"


def test_the_time_limit_saves_and_stops(user: User) -> None:
    """Slurm's warning reaches the ranks through batch script and supervisor."""
    slurm = {"time": "1", "save_margin_s": 50}
    user.zslurm("submit", user.write_run("short", steps=100000, slurm=slurm))
    state = user.wait_for_state("short", "interrupted", "timeout", "failed")
    assert state["state"] == "interrupted"
    assert state["checkpoint_step"] == state["step"]
    assert any(event["event"] == "signal" and event["signal"] == "SIGUSR2" for event in user.events("short"))


def test_refusals_pass_slurms_words_on(user: User) -> None:
    code, message = user.fails("submit", user.write_run("nowhere", slurm={"partition": "nonesuch"}))
    assert code == 1
    assert "sbatch refused the job" in message
    assert "invalid partition specified: nonesuch" in message
    code, message = user.fails("submit", user.write_run("odd", slurm={"constraint": "nonesuch"}))
    assert code == 1
    assert "Invalid feature specification" in message


def test_a_job_that_cannot_start_says_why(user: User) -> None:
    phase = {"tokens": 18 * 16, "context": 16, "global_batch": 18, "micro_batch": 1, "lr": 3e-3}
    user.zslurm("submit", user.write_run("toomany", nodes=9, phases=[phase]))
    wait_for(lambda: user.state("toomany")["reason"], "Slurm to look at the job")
    state = user.state("toomany")
    assert state["state"] == "pending"
    assert state["reason"].startswith("Partition")
    assert state["reason"] in user.zslurm("status", "toomany")


def test_unknown_jobs_and_runs_are_not_found(user: User) -> None:
    assert user.fails("status", "987654")[0] == 3
    assert user.fails("logs", "nonesuch")[0] == 3
    assert user.fails("cancel", "987654")[0] == 3


def test_hostile_names_run_nothing(user: User) -> None:
    """Quotes, substitutions and semicolons in names, paths and values stay text."""
    trap = user.directory / "trapped"
    evil = f"a'b\"c $(touch {trap}) `touch {trap}`; touch {trap} #"
    runs = user.directory / "runs $(touch trapped); 'x'"
    run_file = user.write_run(
        "hostile",
        run={"name": "hostile", "runs_dir": str(runs)},
        slurm={"job_name": evil, "flags": {"comment": evil}},
        cluster={"env": {"EVIL": evil}},
    )
    user.zslurm("submit", run_file)
    assert user.wait_for_state(str(runs / "hostile"), "completed", "failed")["state"] == "completed"
    assert not list(user.directory.rglob("trapped"))
    state = user.state(str(runs / "hostile"))
    name = user.cluster.run(["squeue", "--noheader", "--states=all", "-j", state["job_id"], "-o", "%j"]).stdout
    assert name.strip() == evil


def _rank_process(user: User, run: str, rank: int) -> psutil.Process:
    """The process of a rank, by its command line and its own variables."""
    for process in psutil.process_iter(["cmdline"]):
        command = " ".join(process.info["cmdline"] or [])
        if "zslurm.launch.rank" in command and f"/runs/{run} " in command:
            try:
                if process.environ().get("SLURM_PROCID") == str(rank):
                    return process
            except psutil.Error:
                continue
    raise AssertionError(f"no process of rank {rank}")


def test_a_surrounding_jobs_variables_do_not_leak_into_the_new_job(user: User) -> None:
    """Submitting from inside a job: its task count, partition and CPU binding stay where they are."""
    leaking = {"SLURM_NTASKS": "99", "SBATCH_PARTITION": "nonesuch", "SLURM_CPU_BIND": "mask_cpu:0x1"}
    run_file = user.write_run("clean", steps=4)
    user.cluster.zslurm("submit", run_file, cwd=user.directory, env=leaking)
    assert user.wait_for_state("clean", "completed", "failed")["state"] == "completed"
