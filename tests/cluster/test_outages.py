"""slurmctld stopped, also in mid-command: no traceback, nothing half-done, and the last view with its age."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Iterator

import pytest

from tests.cluster.slurm_cluster import SlurmCluster
from tests.cluster.test_runs import User
from tests.waiting import wait_for
from zslurm.errors import Exit

pytestmark = pytest.mark.slurm


@pytest.fixture
def user(slurm_cluster: SlurmCluster) -> Iterator[User]:
    directory = slurm_cluster.user_dir("outage-test")
    person = User(slurm_cluster, directory)
    person.zslurm("init", "--yes")
    yield person
    slurm_cluster.restore()
    shutil.rmtree(directory, ignore_errors=True)


def test_every_command_survives_a_controller_that_is_away(user: User) -> None:
    run_file = user.write_run("goes-on", steps=100_000)
    user.zslurm("submit", run_file)
    user.wait_for_step("goes-on", 2)
    user.wait_for_state("goes-on", "running")
    user.cluster.stop_controller()
    try:
        done = user.cluster.zslurm("status", cwd=user.directory, check=False)
        wait_for(
            lambda: user.cluster.zslurm("status", cwd=user.directory, check=False).returncode == 4,
            "the view to grow old",
        )
        done = user.cluster.zslurm("status", cwd=user.directory, check=False)
        assert done.returncode == Exit.SLURM_UNAVAILABLE
        assert "goes-on\trunning\t" in done.stdout
        assert done.stderr.startswith("zslurm: the Slurm controller does not answer; what is shown is ")
        assert done.stderr.count("\n") == 1
        before = user.steps("goes-on")[-1]["step"]
        user.wait_for_step("goes-on", before + 2)
        for arguments in (
            ("submit", user.write_run("another", steps=4)),
            ("cancel", "goes-on"),
            ("hold", "goes-on"),
            ("requeue", "goes-on"),
            ("exec", "goes-on", "--", "true"),
        ):
            code, message = user.fails(*arguments)
            assert code == Exit.SLURM_UNAVAILABLE, (arguments, message)
            assert message.count("\n") == 1
        assert not (user.directory / "runs" / "another" / "submissions.jsonl").exists()
        assert user.zslurm("logs", "goes-on", "-n", "1").startswith(("step ", "saved step-")), (
            "files need no Slurm"
        )
    finally:
        user.cluster.start_controller()
    wait_for(
        lambda: user.cluster.zslurm("status", cwd=user.directory, check=False).returncode == 0, "the next answer"
    )
    assert user.state("goes-on")["state"] == "running", "the ranks trained on meanwhile"
    user.zslurm("submit", user.directory / "another.yaml")
    assert user.wait_for_state("another", "completed", "failed")["state"] == "completed"


def test_a_controller_that_goes_in_mid_command_and_comes_back(user: User) -> None:
    """`watch` and `cancel --wait` ask again and again: they say what happened, and go on."""
    user.zslurm("submit", user.write_run("watched", steps=100_000))
    user.wait_for_step("watched", 2)
    out = user.directory / "out"
    python = user.cluster.installation().python
    with out.open("wb") as file:
        watcher = subprocess.Popen(
            [python, "-P", "-u", "-m", "zslurm", "watch", "watched", "-i", "1"],
            env=user.cluster.environment, cwd=user.directory, stdout=file, stderr=file,
            user=user.cluster.user.pw_uid, group=user.cluster.user.pw_gid, extra_groups=[],
        )  # fmt: skip
        wait_for(lambda: "watched  running" in out.read_text(), "the first look")
        user.cluster.stop_controller()
        try:
            wait_for(
                lambda: "the Slurm controller does not answer; what is shown" in out.read_text(), "the outage"
            )
            assert watcher.poll() is None
        finally:
            user.cluster.start_controller()
        wait_for(lambda: "the Slurm controller answers again" in out.read_text(), "the recovery")
        user.zslurm("cancel", "watched", "--wait")
        assert watcher.wait(timeout=90) == 0
    assert "cancelled" in out.read_text()
    assert "Traceback" not in out.read_text()
