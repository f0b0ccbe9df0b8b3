"""On a real Slurm: a job that sbatch got no answer for is found by its script, and can be cancelled."""

from __future__ import annotations

import os
from collections.abc import Iterator
from unittest.mock import patch

import pytest

from tests.on_slurm.cluster.as_user import COMMAND_EVERY_S
from tests.on_slurm.cluster.slurm_cluster import SlurmCluster
from tests.on_slurm.cluster.user import ENDLESS, User, at_work
from tests.waiting import wait_for
from zslurm.run.run_dir import RunDir
from zslurm.slurm.client import SlurmClient

pytestmark = pytest.mark.slurm


@pytest.fixture
def user(slurm_cluster: SlurmCluster) -> Iterator[User]:
    with at_work(slurm_cluster, "unanswered-test") as person:
        yield person


def test_a_job_that_no_submission_recorded_is_found_by_its_script_and_cancelled(user: User) -> None:
    job_id = user.zslurm("submit", "-q", user.write_run("first", steps=ENDLESS))
    user.wait_for_step("first", 3)
    run = RunDir(user.directory / "runs" / "first")
    # A submission that zslurm does not know of: it timed out, and Slurm has accepted it.
    waits = ["sbatch", "--parsable", "--begin=now+1hour"]
    late = user.cluster.run([*waits, run.script], cwd=user.directory).stdout.strip()
    with patch.dict(os.environ, {"SLURM_CONF": str(user.cluster.slurm_conf)}):
        client = SlurmClient()
        with patch("os.getuid", return_value=user.cluster.user.pw_uid):
            assert client.job_of_script(str(run.script)) == late
            assert client.job_of_script(f"{run.script}x") is None
        said = user.cluster.zslurm("cancel", late, cwd=user.directory).stderr
        assert said == f"cancelled job {late} in {run.path}, that no submission recorded\n"
        wait_for(lambda: client.queue([late])[late].state.is_over, "it to end", every_s=COMMAND_EVERY_S)
    assert user.state("first")["state"] == "running", "the run's own job trains on"
    assert user.state("first")["job_id"] == job_id
