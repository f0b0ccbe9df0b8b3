"""Whole runs on a real Slurm, by an ordinary user, through the command line alone."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Iterator

import pytest

from tests.on_slurm.cluster.as_user import COMMAND_EVERY_S
from tests.on_slurm.cluster.slurm_cluster import SlurmCluster
from tests.on_slurm.cluster.user import ENDLESS, STEPS, User, at_work, rank_process
from tests.waiting import wait_for
from zslurm.slurm.hostlist import expand

pytestmark = pytest.mark.slurm


@pytest.fixture
def user(slurm_cluster: SlurmCluster) -> Iterator[User]:
    with at_work(slurm_cluster, "runs-test") as person:
        yield person


def test_two_nodes_train_are_requeued_and_continue(user: User) -> None:
    """The main job: submit, train, requeue in mid-run, continue from the checkpoint, complete."""
    job_id = user.zslurm("submit", "-q", user.write_run("main", steps=ENDLESS, ranks_per_node=2))
    assert job_id.isdigit()
    user.wait_for_step("main", 4)
    state = user.state("main")
    assert (state["state"], state["job_id"], len(expand(state["nodes"]))) == ("running", job_id, 2)
    assert f"step 1/{ENDLESS} loss" in user.zslurm("logs", "main")

    user.zslurm("requeue", "main", "--now")
    state = user.state("main")
    assert (state["job_id"], state["restarts"]) == (job_id, 1)
    assert state["state"] in ("requeued", "running"), "it starts again within seconds"
    stopped_at = user.stopped_at("main")
    user.wait_for_step("main", stopped_at + 4)
    second = [row for row in user.steps("main") if row["attempt"] == 2]
    assert second[0]["step"] == stopped_at + 1, "it saved when it was asked to stop, and lost no step"

    user.zslurm("cancel", "main", "--wait")
    assert user.state("main")["state"] == "cancelled"
    outcomes = [event["outcome"] for event in user.events("main") if event["event"] == "attempt_ended"]
    assert outcomes == ["interrupted", "interrupted"]


def test_it_completes_and_equals_a_local_run(user: User) -> None:
    run_file = user.write_run("complete", nodes=2, trainer="real")
    user.zslurm("submit", run_file)
    state = user.wait_for_state("complete", "completed", "failed")
    assert state["state"] == "completed", state
    assert (state["step"], state["checkpoint_step"], state["exit_code"]) == (STEPS, STEPS, 0)
    local = user.cluster.zslurm(
        "submit", run_file, "--cluster", "local", "--set", "run.name=local", "--set", "slurm.ranks_per_node=2",
        "--nodes", "1", "--wait", cwd=user.directory,
    )  # fmt: skip
    assert "local: completed 12 steps" in local.stderr
    assert [row["loss"] for row in user.steps("complete")] == [row["loss"] for row in user.steps("local")]


def test_ranks_of_a_node_share_sequences_and_nodes_reduce_along_rails(user: User) -> None:
    """Two phases on two nodes of two ranks: the second divides its sequences inside the nodes."""
    short = {"tokens": 4 * 16 * 4, "context": 16, "global_batch": 4, "micro_batch": 1, "lr": 3e-3}
    long = {"tokens": 4 * 32 * 2, "context": 32, "global_batch": 2, "micro_batch": 1, "lr": 3e-3}
    run_file = user.write_run(
        "shared", nodes=2, ranks_per_node=2, trainer="real", phases=[short, long | {"context_parallel": 2}],
        parallel={"dtype": "fp64", "threads": 1, "collectives": "two_level"},
    )  # fmt: skip
    code, refused = user.fails("submit", run_file, "--set", "phases[1].context_parallel=4")
    assert (code, "phases[1].context_parallel (4) exceeds the 2 ranks of a node" in refused) == (2, True)
    user.zslurm("submit", run_file)
    state = user.wait_for_state("shared", "completed", "failed")
    assert state["state"] == "completed", state
    logs = user.zslurm("logs", "shared")
    assert "collectives in two levels: 2 ranks in each node, 2 nodes along each rail" in logs
    user.cluster.zslurm(
        "submit", run_file, "--cluster", "local", "--set", "run.name=alone", "--set", "slurm.ranks_per_node=1",
        "--set", "phases[1].context_parallel=1", "--nodes", "1", "--wait", cwd=user.directory,
    )  # fmt: skip
    shared, alone = ([row["loss"] for row in user.steps(name)] for name in ("shared", "alone"))
    assert len(shared) == 8
    assert shared == pytest.approx(alone, rel=1e-7)


def test_pending_then_cancelled(user: User) -> None:
    user.zslurm("submit", user.write_run("waits", slurm={"flags": {"begin": "now+1hour"}}))
    state = user.state("waits")
    assert (state["state"], state["reason"]) == ("pending", "BeginTime")
    user.zslurm("cancel", "waits")
    state = user.wait_for_state("waits", "cancelled")
    assert (state["active"], state["reason"]) == (False, None), "why it waited is not why it was cancelled"


def test_an_active_run_is_not_submitted_again(user: User) -> None:
    run_file = user.write_run("busy", slurm={"flags": {"begin": "now+1hour"}})
    user.zslurm("submit", run_file)
    code, message = user.fails("submit", run_file)
    assert code == 1
    assert "busy: the run is pending as job" in message


def test_a_users_bug_fails_the_run_with_its_cause(user: User) -> None:
    """A rank that raises: the real exit code, the rank, its node and its error reach status and Slurm."""
    broken = user.write_run("broken", trainer="real", parallel={"dtype": "fp32", "threads": 1, "device": "cuda"})
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
    """Peers of a dead rank fail too; the one that died first gets the blame. Without Aegis that is the end."""
    aegis = {"grace_s": 3, "mode": "off"}
    user.zslurm("submit", user.write_run("killed", steps=ENDLESS, ranks_per_node=2, aegis=aegis))
    user.wait_for_step("killed", 2)
    nodes = user.nodes_of("killed")
    rank_process(user, "killed", rank=3).kill()
    state = user.wait_for_state("killed", "failed")
    assert state["exit_code"] == 137
    assert (state["cause"]["rank"], state["cause"]["node"]) == (3, nodes[1])
    assert state["cause"]["message"] == "Killed"


def test_a_step_that_was_cancelled_is_called_so_and_started_again(user: User) -> None:
    """`scancel JOB.STEP` by a user or an administrator. It looked like ranks that were killed."""
    user.zslurm("submit", user.write_run("stepless", steps=ENDLESS))
    user.wait_for_step("stepless", 2)
    steps = user.cluster.run(["squeue", "--steps", "--noheader", "-o", "%i %j"]).stdout.splitlines()
    (step,) = [line.split()[0] for line in steps if line.endswith("attempt-1")]
    user.cluster.run_as_root(["scancel", step])
    wait_for(lambda: any(row["attempt"] == 2 for row in user.steps("stepless")), "the next attempt to train")
    (decision,) = [event for event in user.events("stepless") if event["event"] == "decision"]
    assert (decision["action"], decision["root"]["kind"]) == ("restart", "slurm_cancelled")
    # Slurm's line with the step's number may come after srun has ended.
    assert decision["root"]["line"].replace(f" {step}", "") == "the Slurm step was cancelled (scancel)"
    (ended,) = [event for event in user.events("stepless") if event["event"] == "attempt_ended"]
    assert (ended["cause"]["message"], ended["cause"].get("rank")) == (decision["root"]["line"], None)
    user.zslurm("cancel", "stepless", "--wait")


def test_a_killed_supervisor_is_replaced_and_costs_nothing(user: User) -> None:
    user.zslurm("submit", user.write_run("survives", steps=300))
    user.wait_for_step("survives", 2)
    supervisor = json.loads((user.directory / "runs" / "survives" / "supervisor.json").read_text())
    os.kill(supervisor["pid"], signal.SIGKILL)
    state = user.wait_for_state("survives", "completed", "failed")
    assert state["state"] == "completed", user.zslurm("logs", "survives", "--supervisor")
    assert {row["attempt"] for row in user.steps("survives")} == {1}, "the ranks trained on meanwhile"
    starts = [event for event in user.events("survives") if event["event"] == "supervisor_started"]
    assert [event.get("adopted") for event in starts] == [None, 1]


def test_a_dead_node_requeues_the_job(user: User) -> None:
    user.zslurm("submit", user.write_run("bereft", steps=ENDLESS))
    user.wait_for_step("bereft", 5)
    user.cluster.kill_node(user.nodes_of("bereft")[1], noticed_at_once=True)
    user.wait_for_state("bereft", "requeued", "node-failed")
    assert user.state("bereft")["state"] == "requeued", "the template asks for --requeue"


SLOW = {"env": {"ZSLURM_TEST_STEP_S": "0.5"}}
"""Stand-ins whose run waits for its time limit, and has nothing to do meanwhile."""


def test_the_time_limit_saves_and_goes_back_into_the_queue(user: User) -> None:
    """Slurm's warning reaches the ranks through batch script and supervisor, which then requeues the job."""
    slurm = {"time": "1", "save_margin_s": 50}
    user.zslurm("submit", user.write_run("short", steps=ENDLESS, slurm=slurm, cluster=SLOW))
    wait_for(lambda: any(event["event"] == "requeued" for event in user.events("short")), "the job to be requeued")
    state = user.wait_for_state("short", "requeued", "running")
    assert state["checkpoint_step"] == user.stopped_at("short")
    assert any(event["event"] == "signal" and event["signal"] == "SIGUSR2" for event in user.events("short"))


def test_the_time_limit_ends_a_run_that_shall_not_be_requeued(user: User) -> None:
    slurm = {"time": "1", "save_margin_s": 50}
    aegis = {"grace_s": 3, "requeue_at_time_limit": False}
    user.zslurm("submit", user.write_run("once", steps=ENDLESS, slurm=slurm, aegis=aegis, cluster=SLOW))
    state = user.wait_for_state("once", "interrupted", "timeout", "failed")
    assert state["state"] == "interrupted"
    assert state["checkpoint_step"] == state["step"]


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
    run_file = user.write_run("toomany", nodes=9, phases=[phase])
    done = user.cluster.zslurm("submit", run_file, cwd=user.directory, check=False)
    if done.returncode:  # 24.11 refuses it at once
        assert "Requested node configuration is not available" in done.stderr
        return
    # Slurm says None or Priority until its scheduler has looked at the job.
    wait_for(
        lambda: str(user.state("toomany")["reason"]).startswith("Partition"), "Slurm's reason",
        every_s=COMMAND_EVERY_S,
    )  # fmt: skip
    state = user.state("toomany")
    assert state["state"] == "pending"
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


def test_a_surrounding_jobs_variables_do_not_leak_into_the_new_job(user: User) -> None:
    """Submitting from inside a job: its task count, partition and CPU binding stay where they are."""
    leaking = {"SLURM_NTASKS": "99", "SBATCH_PARTITION": "nonesuch", "SLURM_CPU_BIND": "mask_cpu:0x1"}
    run_file = user.write_run("clean", steps=4)
    user.cluster.zslurm("submit", run_file, cwd=user.directory, env=leaking)
    assert user.wait_for_state("clean", "completed", "failed")["state"] == "completed"
