"""Whole runs on a real Slurm, by an ordinary user, through the command line alone."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.on_slurm.cluster.slurm_cluster import SlurmCluster
from tests.on_slurm.cluster.user import ENDLESS, STEPS, User, at_work
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
    (prepared,) = [event for event in user.events("complete") if event["event"] == "kernels_prepared"]
    assert prepared["problems"] == {"no GPU is seen": state["nodes"]}, "GPUs are files here"
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


def test_a_step_that_was_cancelled_is_called_so_and_started_again(user: User) -> None:
    """`scancel JOB.STEP` by a user or an administrator. It looked like ranks that were killed."""
    user.zslurm("submit", user.write_run("stepless", steps=ENDLESS, forked_ranks=False))
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


SLOW = {"env": {"STEP_S": "0.5"}}
"""A run that waits for its time limit, and has nothing to do meanwhile."""


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


def test_a_surrounding_jobs_variables_do_not_leak_into_the_new_job(user: User) -> None:
    """Submitting from inside a job: its task count, partition and CPU binding stay where they are."""
    leaking = {"SLURM_NTASKS": "99", "SBATCH_PARTITION": "nonesuch", "SLURM_CPU_BIND": "mask_cpu:0x1"}
    run_file = user.write_run("clean", steps=4)
    user.cluster.zslurm("submit", run_file, cwd=user.directory, env=leaking)
    assert user.wait_for_state("clean", "completed", "failed")["state"] == "completed"
