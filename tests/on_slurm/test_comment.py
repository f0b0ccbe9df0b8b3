"""The comment of a real job, written by its owner: Slurm shows it, and nothing in it is more than text."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from tests.on_slurm.as_user import COMMAND_EVERY_S
from tests.on_slurm.slurm_cluster import SlurmCluster
from tests.on_slurm.user import directory_of
from tests.waiting import wait_for
from zslurm.slurm.client import SlurmClient

pytestmark = pytest.mark.slurm

TELL = """
import os, sys
from zslurm.aegis.notify.job_comment import JobComment
from zslurm.run.events import Decided
said = []
comment = JobComment(sys.argv[1], os.environ, said.append)
root = {"kind": "rank_killed", "role": "root", "scope": "user", "node": "node1", "rank": 3, "line": sys.argv[2]}
comment.notify(Decided(attempt=2, action="restart", mode="act", root=root))
comment.flush(90)
comment.close(90)
print("|".join(said))
"""
EVIL = 'x\' JobState=FAILED; ExcNodeList=node0\n "$(touch owned)" `id` | Ende Größe'
"""As log lines may be."""

Submit = Callable[..., str]


@pytest.fixture
def submit(slurm_cluster: SlurmCluster) -> Iterator[Submit]:
    with directory_of(slurm_cluster, "comment-test") as directory:
        yield lambda *options: slurm_cluster.sbatch("sleep 600", *options, cwd=directory)


def tell(cluster: SlurmCluster, job_id: str, line: str = EVIL) -> str:
    """The user's own process writes the comment; what it says of failures."""
    program = cluster.instance.user / "comment-test" / "tell.py"
    program.write_text(TELL)
    return cluster.program(program, job_id, line).stdout.strip()


def comment_of(cluster: SlurmCluster, job_id: str) -> str:
    job = SlurmClient(cluster.environment).job(job_id)
    assert job is not None
    return job.comment


WRITTEN = (
    "attempt 2, restart: rank killed on node1, rank 3: x JobState FAILED ExcNodeList node0 "
    "(touch owned) id Ende Gr e"
)


def test_the_owner_writes_the_cause_and_nothing_else_changes(slurm_cluster: SlurmCluster, submit: Submit) -> None:
    job_id = submit()
    wait_for(lambda: comment_state(slurm_cluster, job_id) == "RUNNING", "the job", every_s=COMMAND_EVERY_S)
    assert tell(slurm_cluster, job_id) == ""
    comment = comment_of(slurm_cluster, job_id)
    assert comment.startswith("zslurm: ")
    assert comment.endswith(WRITTEN)
    shown = slurm_cluster.run(["scontrol", "show", "job", job_id]).stdout
    assert f"Comment={comment}" in shown
    assert "ExcNodeList=(null)" in shown
    assert "JobState=RUNNING" in shown


def comment_state(cluster: SlurmCluster, job_id: str) -> str:
    job = SlurmClient(cluster.environment).job(job_id)
    return str(job.state) if job is not None else ""


def test_what_the_job_was_submitted_with_stays_in_front(slurm_cluster: SlurmCluster, submit: Submit) -> None:
    theirs = "project 7, ask 'ada' \"x\"; a=b"
    job_id = submit("--hold", f"--comment={theirs}")
    for line in ("first", "second"):
        assert tell(slurm_cluster, job_id, line) == ""
    comment = comment_of(slurm_cluster, job_id)
    assert comment.startswith(f"{theirs}; zslurm: ")
    assert comment.endswith("rank 3: second")
    assert comment.count("zslurm: ") == 1


def test_where_slurm_says_no_the_reason_is_told_and_nothing_raised(
    slurm_cluster: SlurmCluster, submit: Submit
) -> None:
    assert tell(slurm_cluster, "999999").startswith("job comment: ")
    job_id = submit("--hold")
    slurm_cluster.stop_controller()
    try:
        assert tell(slurm_cluster, job_id).startswith("job comment: the Slurm controller does not answer")
    finally:
        slurm_cluster.start_controller()
    wait_for(lambda: tell(slurm_cluster, job_id) == "", "Slurm to answer again", every_s=COMMAND_EVERY_S)
