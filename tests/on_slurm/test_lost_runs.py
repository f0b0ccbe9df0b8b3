"""On a real Slurm: runs whose directory is copied, moved or removed, and jobs that are left without one."""

from __future__ import annotations

import json
from collections.abc import Iterator

import pytest

from tests.on_slurm.cluster.as_user import COMMAND_EVERY_S
from tests.on_slurm.cluster.slurm_cluster import SlurmCluster
from tests.on_slurm.cluster.user import ENDLESS, User, at_work
from tests.waiting import wait_for
from zslurm.run.run_dir import RunDir
from zslurm.slurm.client import SlurmClient
from zslurm.train.jsonl import read_jsonl

pytestmark = pytest.mark.slurm

QUICK = {"grace_s": 3, "run_dir_lost_s": 1}


@pytest.fixture
def user(slurm_cluster: SlurmCluster) -> Iterator[User]:
    """The user in a fresh directory with a profile; jobs end and nodes come back."""
    with at_work(slurm_cluster, "lost-test") as person:
        yield person


def test_a_run_whose_directory_moves_away_ends_and_is_not_requeued(user: User) -> None:
    job_id = user.zslurm("submit", "-q", user.write_run("first", steps=ENDLESS, aegis=QUICK))
    user.wait_for_step("first", 5)
    before, after = user.directory / "runs" / "first", user.directory / "runs" / "second"
    user.cluster.run(["mv", before, after])
    state = user.wait_for_state("second", "failed")
    assert (state["job_id"], state["restarts"], state["exit_code"]) == (job_id, 0, 93)
    assert f"was moved to {after}; nothing was saved" in state["cause"]["message"]
    assert not before.exists()
    rows = list(read_jsonl(RunDir(after).events))
    assert not [row for row in rows if row["event"] in ("decision", "requeued", "deputy_acted")]


def test_a_copy_is_left_alone_by_the_original_and_a_job_without_a_directory_is_ended(user: User) -> None:
    waits = {"flags": {"begin": "now+1hour"}}
    job_id = user.zslurm("submit", "-q", user.write_run("first", slurm=waits))
    runs = user.directory / "runs"
    user.cluster.run(["cp", "-a", runs / "first", runs / "second"])
    assert user.state("second")["state"] == "copied"
    for command in ("cancel", "requeue"):
        code, message = user.fails(command, "second")
        assert (code, f"has no job to {command}: job {job_id} is the original's" in message) == (1, True)
    assert user.state("first")["state"] == "pending"

    user.cluster.run(["rm", "-r", runs / "first", runs / "second"])
    shown = user.zslurm("status", job_id)
    assert shown.startswith(f"{job_id}: job `first` is pending, and its run directory {runs / 'first'} is gone")
    assert shown.strip().endswith(f"`scancel {job_id}` ends it")
    (state,) = json.loads(user.zslurm("status", job_id, "--json"))
    assert (state["state"], state["active"], state["run_dir_exists"]) == ("pending", True, False)
    code, message = user.fails("logs", job_id)
    assert (code, f"`scancel {job_id}` ends it" in message) == (3, True)
    user.zslurm("cancel", job_id)
    client = SlurmClient(user.cluster.environment)
    wait_for(
        lambda: (job := client.job(job_id)) is None or job.state.is_over, "the job to end", every_s=COMMAND_EVERY_S
    )


def test_a_run_that_is_not_in_the_index_is_found_by_its_job(user: User) -> None:
    waits = {"flags": {"begin": "now+1hour"}}
    job_id = user.zslurm("submit", "-q", user.write_run("first", slurm=waits))
    elsewhere = user.cluster.zslurm(
        "cancel", job_id, cwd=user.cluster.user_dir("elsewhere"), env={"XDG_STATE_HOME": "/nonexistent"}
    )
    assert elsewhere.stderr.startswith(f"cancelled job {job_id} of first")
    assert user.wait_for_state("first", "cancelled")["job_id"] == job_id
