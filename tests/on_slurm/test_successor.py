"""Nodes without scontrol: a second job, queued at once, continues what the first could not requeue."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.on_slurm.cluster.as_user import COMMAND_EVERY_S
from tests.on_slurm.cluster.slurm_cluster import SlurmCluster
from tests.on_slurm.cluster.user import ENDLESS, STEPS, User, at_work, rank_process
from tests.waiting import wait_for

pytestmark = pytest.mark.slurm

MISSING = {"scontrol", "squeue", "sbatch", "sacct", "sinfo"}


@pytest.fixture
def user(slurm_cluster: SlurmCluster) -> Iterator[User]:
    with at_work(slurm_cluster, "successor-test") as person:
        yield person


def poor_nodes(user: User, *missing: str) -> dict[str, object]:
    """A cluster section whose jobs find srun and the system's programs, but not those that are missing."""
    tools = user.directory / "node-tools"
    if not tools.exists():
        tools.mkdir()
        for program in Path("/usr/bin").iterdir():
            if program.name not in {*MISSING, *missing}:
                (tools / program.name).symlink_to(program)
    return {"scontrol_on_nodes": False, "env": {"PATH": str(tools)}}


def submit(user: User, name: str, **sections: object) -> tuple[str, str]:
    """Submit; returns the ids of the job and of its successor."""
    job_id = user.zslurm("submit", "-q", user.write_run(name, **sections))  # type: ignore[arg-type]
    successor = user.state(name)["successor"]
    assert successor is not None
    return job_id, successor


def slurm_state(user: User, job_id: str) -> str:
    listed = user.cluster.run(["squeue", "--noheader", "--states=all", "-j", job_id, "-o", "%T %r"]).stdout
    return listed.strip()


def test_a_run_that_completes_needs_no_successor(user: User) -> None:
    """Neither scontrol nor scancel on the nodes: the successor finds out by itself and ends with exit code 0."""
    job_id, successor = submit(user, "done", cluster=poor_nodes(user, "scancel"))
    assert f"successor   job {successor} continues the run if this one ends early" in user.zslurm("status", "done")
    assert user.wait_for_state("done", "completed", "failed")["state"] == "completed"
    wait_for(
        lambda: slurm_state(user, successor).startswith("COMPLETED"),
        "the successor to end",
        every_s=COMMAND_EVERY_S,
    )
    state = user.state("done")
    assert (state["state"], state["job_id"], state["step"], state["attempt"]) == ("completed", job_id, STEPS, 1)
    assert f"job {successor} had nothing to continue: the run came to its end in job {job_id}" in user.zslurm(
        "logs", "--events", "done"
    )


def test_the_job_in_which_a_run_fails_cancels_its_successor(user: User) -> None:
    job_id, successor = submit(user, "fails", steps=ENDLESS, cluster=poor_nodes(user), aegis={"mode": "off"})
    user.wait_for_step("fails", 2)
    assert slurm_state(user, successor) == "PENDING Dependency"
    rank_process(user, "fails", rank=1).kill()
    state = user.wait_for_state("fails", "failed", "completed")
    assert (state["state"], state["job_id"], state["cause"]["rank"]) == ("failed", job_id, 1)
    wait_for(
        lambda: slurm_state(user, successor).startswith("CANCELLED"),
        "the successor to be cancelled",
        every_s=COMMAND_EVERY_S,
    )


def test_where_the_time_is_up_the_successor_continues(user: User) -> None:
    job_id, successor = submit(user, "long", steps=ENDLESS, cluster=poor_nodes(user, "scancel"))
    user.wait_for_step("long", 2)
    # As Slurm does before the time limit: a test of that itself is in test_runs.
    user.cluster.run(["scancel", "--batch", "--signal=USR2", job_id])
    wait_for(
        lambda: user.state("long")["job_id"] == successor, "the successor to take over", every_s=COMMAND_EVERY_S
    )
    assert any(event["event"] == "run_ended" and event["job_id"] == job_id for event in user.events("long"))
    stopped_at = user.stopped_at("long")
    user.wait_for_step("long", stopped_at + 2)
    second = [row for row in user.steps("long") if row["attempt"] == 2]
    assert second[0]["step"] == stopped_at + 1, "it continued where the first had saved"
    code, message = user.fails("submit", user.directory / "long.yaml")
    assert (code, f"as job {successor}" in message) == (1, True)
    user.zslurm("cancel", "long", "--wait")
    assert user.state("long")["state"] == "cancelled"


def test_cancelling_a_run_cancels_both_jobs(user: User) -> None:
    job_id, successor = submit(user, "gone", steps=ENDLESS, slurm={"successor": "on"})
    user.wait_for_step("gone", 2)
    user.zslurm("cancel", "gone", "--wait")
    assert user.state("gone")["state"] == "cancelled"
    assert slurm_state(user, successor).startswith("CANCELLED")
    assert {job for job in (job_id, successor) if slurm_state(user, job).startswith("RUNNING")} == set()
