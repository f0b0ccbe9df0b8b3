"""slurmctld stopped, also in mid-command: no traceback, nothing half-done, and the last view with its age."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.on_slurm.cluster.as_user import COMMAND_EVERY_S
from tests.on_slurm.cluster.slurm_cluster import SlurmCluster
from tests.on_slurm.cluster.user import ENDLESS, User, at_work
from tests.waiting import DEADLINE_S, wait_for
from zslurm.core.errors import Exit

pytestmark = pytest.mark.slurm


@pytest.fixture
def user(slurm_cluster: SlurmCluster) -> Iterator[User]:
    with at_work(slurm_cluster, "outage-test") as person:
        yield person


def test_every_command_survives_a_controller_that_is_away(user: User) -> None:
    run_file = user.write_run("goes-on", steps=ENDLESS)
    user.zslurm("submit", run_file)
    user.wait_for_step("goes-on", 2)
    user.wait_for_state("goes-on", "running")
    another = user.write_run("another", steps=4)
    assert away(user, "status").returncode == 0, "the view that is shown later"
    user.cluster.stop_controller()
    try:
        # What a command found a moment ago is believed for a while: until that is over, there is no outage.
        done = wait_for(lambda: refused(away(user, "status")), "the view to grow old", every_s=COMMAND_EVERY_S)
        assert done.returncode == Exit.SLURM_UNAVAILABLE
        assert "goes-on\trunning\t" in done.stdout
        assert done.stderr.startswith("zslurm: the Slurm controller does not answer; what is shown is ")
        assert done.stderr.count("\n") == 1
        before = user.steps("goes-on")[-1]["step"]
        user.wait_for_step("goes-on", before + 2)
        commands = (
            ("submit", another),
            ("cancel", "goes-on"),
            ("requeue", "goes-on"),
            ("exec", "goes-on", "--", "true"),
            ("cluster", "check"),
            ("init", "--yes"),
        )
        with ThreadPoolExecutor() as pool:  # each asks four times, with pauses, before it gives up
            ends = list(pool.map(lambda arguments: away(user, *arguments), commands))
        for arguments, done in zip(commands, ends, strict=True):
            assert done.returncode == Exit.SLURM_UNAVAILABLE, (arguments, done.stderr)
            assert "Traceback" not in done.stderr
            assert done.stderr.count("\n") == 1
        assert not (user.directory / "runs" / "another" / "submissions.jsonl").exists()
        assert user.zslurm("logs", "goes-on", "-n", "1").startswith(("step ", "saved step ")), (
            "files need no Slurm"
        )
    finally:
        user.cluster.start_controller()
    wait_for(
        lambda: user.cluster.zslurm("status", cwd=user.directory, check=False).returncode == 0,
        "the next answer",
        every_s=COMMAND_EVERY_S,
    )
    assert user.state("goes-on")["state"] == "running", "the ranks trained on meanwhile"
    user.zslurm("submit", another)
    assert user.wait_for_state("another", "completed", "failed")["state"] == "completed"


def away(user: User, *arguments: str | Path) -> subprocess.CompletedProcess[str]:
    """A command while the controller is away, or about to be: each configuration has a view of its own."""
    return user.cluster.zslurm(*arguments, env=user.cluster.impatient, cwd=user.directory, check=False)


def refused(done: subprocess.CompletedProcess[str]) -> subprocess.CompletedProcess[str] | None:
    return done if done.returncode else None


def test_a_controller_that_goes_in_mid_command_and_comes_back(user: User) -> None:
    """`watch` and `cancel --wait` ask again and again: they say what happened, and continue."""
    user.zslurm("submit", user.write_run("watched", steps=ENDLESS))
    user.wait_for_step("watched", 2)
    out = user.directory / "out"
    python = user.cluster.installation().python
    with out.open("wb") as file:
        watcher = subprocess.Popen(
            [python, "-P", "-u", "-m", "zslurm", "watch", "watched", "-i", "1"],
            env=user.cluster.environment | user.cluster.impatient, cwd=user.directory, stdout=file, stderr=file,
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
        assert watcher.wait(timeout=DEADLINE_S) == 0
    assert "cancelled" in out.read_text()
    assert "Traceback" not in out.read_text()
