"""`zslurm status` if Slurm has forgotten a job: accounting answers, and without it the run's own files do."""

from __future__ import annotations

import shutil
from collections.abc import Iterator

import pytest

from tests.on_slurm.cluster.as_user import COMMAND_EVERY_S
from tests.on_slurm.cluster.slurm_cluster import SlurmCluster
from tests.on_slurm.cluster.user import User, at_work
from tests.on_slurm.test_programs import write
from tests.waiting import wait_for
from zslurm.core.errors import Exit
from zslurm.slurm.accounting import FORMAT, StepUsage, parse_usage
from zslurm.slurm.jobs import FIELD_END

pytestmark = pytest.mark.slurm


@pytest.fixture
def user(slurm_cluster_with_accounting: SlurmCluster) -> Iterator[User]:
    with at_work(slurm_cluster_with_accounting, "accounting-test") as person:
        yield person


def _wait_until_forgotten(user: User, job_id: str) -> None:
    def forgotten() -> bool:
        listed = user.cluster.run(["squeue", "--noheader", "--states=all", "--format=%i"]).stdout.split()
        return job_id not in listed

    wait_for(forgotten, f"the controller to forget job {job_id}", every_s=COMMAND_EVERY_S)


def test_finished_jobs_keep_their_state(user: User) -> None:
    done = user.zslurm("submit", "-q", user.write_run("done", nodes=1))
    waiting = user.zslurm(
        "submit", "-q", user.write_run("withdrawn", nodes=1, slurm={"flags": {"begin": "now+1hour"}})
    )
    program = write(user, "broken", command=["sh", "-c", "exit 2"], nodes=1, aegis={"retries": 0})
    broken = user.zslurm("submit", "-q", program)
    user.wait_for_state("done", "completed")
    user.wait_for_state("broken", "failed")
    # Not through zslurm: the run's own files know nothing of it, only accounting does.
    user.cluster.run(["scancel", waiting])
    for job_id in (done, waiting, broken):
        _wait_until_forgotten(user, job_id)
    assert user.state("done")["state"] == "completed"
    assert user.state("broken")["state"] == "failed"
    assert user.state("broken")["exit_code"] == Exit.STOPPED
    assert user.state("withdrawn")["state"] == "cancelled"


def test_a_forgotten_job_without_accounting_is_shown_by_its_recorded_outcome(user: User) -> None:
    job_id = user.zslurm("submit", "-q", user.write_run("short", nodes=1))
    user.wait_for_state("short", "completed")
    _wait_until_forgotten(user, job_id)
    tools = user.directory / "tools"
    tools.mkdir()
    for name in ("sbatch", "squeue", "scontrol", "scancel", "sinfo"):
        (tools / name).symlink_to(shutil.which(name) or "")
    # sacct is not on this PATH, as on a site without accounting
    shown = user.cluster.zslurm("status", "short", cwd=user.directory, env={"PATH": str(tools)}).stdout
    assert shown.startswith(f"short: completed (job {job_id}")


def test_the_steps_of_a_job_are_read_from_accounting(user: User) -> None:
    """What the report takes for ranks that were killed and left no record of their own."""
    job = user.zslurm("submit", "-q", user.write_run("measured", nodes=1, trainer="real"))
    user.wait_for_state("measured", "completed")
    options = ["--duplicates", "--noheader", "--noconvert", "--parsable2", f"--delimiter={FIELD_END}"]

    def ranks() -> list[StepUsage]:
        asked = ["sacct", *options, f"--jobs={job}", f"--format={FORMAT}"]
        return [step for step in parse_usage(user.cluster.run(asked).stdout) if step.name == "attempt-1"]

    (step,) = wait_for(ranks, "the step of the ranks in accounting", every_s=COMMAND_EVERY_S)
    assert (step.job_id, step.step.isdecimal(), step.tasks, step.nodes) == (job, True, 1, 1)
    assert "| CPU cores" in user.zslurm("report", "measured", "--out", "-", "--format", "md")
