"""SlurmClient on a real cluster: what happens to jobs is what it says, and what it tells Slurm happens."""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path

import pytest

from tests.on_slurm.cluster.as_user import COMMAND_EVERY_S
from tests.on_slurm.cluster.slurm_cluster import SlurmCluster
from tests.on_slurm.cluster.user import directory_of
from tests.waiting import wait_for
from zslurm.core.errors import NotFound, SlurmRefused, SlurmUnavailable
from zslurm.slurm.client import SlurmClient
from zslurm.slurm.helper_script import helper_script
from zslurm.slurm.jobs import ExitCode, JobRecord
from zslurm.slurm.run_command import Retries
from zslurm.slurm.states import JobState

pytestmark = pytest.mark.slurm

Submit = Callable[..., str]

RESTART_PAUSE_S = 2
"""Slurm refuses a second start within the same second as the end of the first."""


def client_of(cluster: SlurmCluster, retries: Retries | None = None) -> SlurmClient:
    return SlurmClient(cluster.environment, retries=retries)


@pytest.fixture(scope="module")
def client(slurm_cluster: SlurmCluster) -> SlurmClient:
    return client_of(slurm_cluster)


@pytest.fixture
def submit(slurm_cluster: SlurmCluster) -> Iterator[Submit]:
    """Submits a script in a fresh directory; the cluster is as before when the test ends."""
    with directory_of(slurm_cluster, "client-test") as directory:
        yield lambda script, *options: slurm_cluster.sbatch(script, *options, cwd=directory)


def reaches(client: SlurmClient, job_id: str, state: JobState) -> JobRecord:
    def there() -> JobRecord | None:
        job = client.job(job_id)
        return job if job and job.state is state else None

    return wait_for(there, f"job {job_id} to be {state}", every_s=COMMAND_EVERY_S)


def test_a_job_that_waits_says_why(client: SlurmClient, submit: Submit) -> None:
    held = client.job(submit("true", "--hold", "--job-name", "a|b, c", "--comment", "x=1 JobState=FAILED"))
    assert held is not None
    assert (held.state, held.reason, held.nodes, held.restarts) == (JobState.PENDING, "JobHeldUser", "", 0)
    assert (held.name, held.comment) == ("a|b, c", "x=1 JobState=FAILED")
    assert held.submit_time is not None
    assert held.start_time is None


def test_a_running_job_has_nodes_and_a_planned_end(client: SlurmClient, submit: Submit) -> None:
    job = reaches(client, submit("sleep 600", "-N2", "-w", "node[2-3]", "--time=1:00:00"), JobState.RUNNING)
    assert (job.nodes, job.n_nodes, job.user, job.partition) == ("node[2-3]", 2, "zslurm-test", "batch")
    assert job.time_limit == timedelta(hours=1)
    assert job.start_time is not None
    assert job.end_time == job.start_time + job.time_limit


def test_slurm_expects_a_helper_job_when_a_node_is_free_that_it_may_use(
    client: SlurmClient, submit: Submit
) -> None:
    def starts_in(exclude: str) -> float | None:
        script = helper_script(
            "#!/bin/bash\n#SBATCH --exclusive\n#SBATCH --partition=batch\n", name="h", nodes=1, exclude=exclude,
            output="/dev/null", left_s=7200.0, now=time.time(), command="true",
        )  # fmt: skip
        estimate = client.estimate_start(script)
        return None if estimate is None else estimate.time.timestamp() - time.time()

    job = reaches(
        client, submit("sleep 600", "-N4", "-w", "node[0-3]", "--exclusive", "--time=30"), JobState.RUNNING
    )
    if client.can_test():
        now, later = starts_in("node[0-3]"), starts_in("node[4-7]")
        assert now is not None and now < 60
        assert later is not None and 1500 < later < 1860, "when the job that has the others reaches its limit"
        with pytest.raises(SlurmRefused):
            starts_in("node[0-7]")
    client.cancel(job.job_id)


def test_how_jobs_ended_is_told_apart_with_one_call(client: SlurmClient, submit: Submit) -> None:
    good, bad, killed = submit("true"), submit("exit 3"), submit("kill -9 $$")
    endless = submit("sleep 600")
    reaches(client, endless, JobState.RUNNING)
    client.cancel(endless)
    reaches(client, endless, JobState.CANCELLED)
    wait_for(
        lambda: all(job.state.is_over for job in client.queue([good, bad, killed]).values()),
        "the jobs to end",
        every_s=COMMAND_EVERY_S,
    )

    jobs = client.queue([good, bad, killed, endless, "99999"])
    assert set(jobs) == {good, bad, killed, endless}
    assert (jobs[good].state, jobs[good].exit_code) == (JobState.COMPLETED, ExitCode(0, 0))
    assert (jobs[bad].state, jobs[bad].exit_code) == (JobState.FAILED, ExitCode(3, 0))
    assert (jobs[killed].state, jobs[killed].exit_code) == (JobState.FAILED, ExitCode(0, 9))
    client.cancel(good)  # ended already: nothing to do


def test_a_requeued_job_keeps_its_id_and_counts_its_restarts(client: SlurmClient, submit: Submit) -> None:
    job_id = submit("echo $SLURM_RESTART_COUNT >> restarts; sleep 600", "--requeue")
    reaches(client, job_id, JobState.RUNNING)
    client.requeue(job_id)
    assert reaches(client, job_id, JobState.PENDING).restarts == 1
    client.start_in(job_id, RESTART_PAUSE_S)
    job = reaches(client, job_id, JobState.RUNNING)
    wait_for(lambda: Path(job.work_dir, "restarts").read_text() == "\n1\n", "the second start of the script")


def test_a_job_can_be_moved_off_a_node_by_its_own_user(
    client: SlurmClient, slurm_cluster: SlurmCluster, submit: Submit
) -> None:
    job_id = submit("sleep 600", "--requeue", "-w", "node0", "--exclude", "node7")
    reaches(client, job_id, JobState.RUNNING)
    move = (
        "import sys; from zslurm.slurm.client import SlurmClient; from tests.waiting import wait_for\n"
        "client, job = SlurmClient(), sys.argv[1]\n"
        "client.requeue(job)\n"
        f"wait_for(lambda: client.job(job).state.is_waiting, 'the job to wait', every_s={COMMAND_EVERY_S})\n"
        "excluded = client.excluded_nodes(job) + ',node0'\n"
        "client.update(job, ReqNodeList='', ExcNodeList=excluded, Comment='node0 is bad')\n"
        f"client.start_in(job, {RESTART_PAUSE_S})\n"
    )
    slurm_cluster.run([slurm_cluster.installation().python, "-c", move, job_id])
    job = reaches(client, job_id, JobState.RUNNING)
    assert client.excluded_nodes(job_id) == "node[0,7]"
    assert job.nodes not in ("node0", "node7")
    assert job.comment == "node0 is bad"


def test_a_dead_node_fails_a_job_or_requeues_it(
    client: SlurmClient, slurm_cluster: SlurmCluster, submit: Submit
) -> None:
    final = submit("sleep 600", "-N2", "-w", "node[4-5]", "--no-requeue")
    again = submit("sleep 600", "-N2", "-w", "node[5-6]", "--requeue")
    for job_id in (final, again):
        reaches(client, job_id, JobState.RUNNING)
    slurm_cluster.kill_node("node5", noticed_at_once=True)
    assert reaches(client, final, JobState.NODE_FAIL).restarts == 0
    assert reaches(client, again, JobState.PENDING).restarts == 1
    (node,) = (node for node in client.nodes() if node.name == "node5")
    assert (node.state, node.is_usable, node.reason) == ("down", False, "killed")


def test_one_step_of_a_job_is_killed_by_its_name(client: SlurmClient, submit: Submit) -> None:
    job_id = submit("srun -n1 --overlap -J 'one step' sleep 600 & srun -n1 --overlap -J other sleep 600 & wait")
    wait_for(
        lambda: {"one step", "other"} <= set(client.steps(job_id).values()), "both steps", every_s=COMMAND_EVERY_S
    )
    client.kill_step(job_id, "one step")
    wait_for(lambda: "one step" not in client.steps(job_id).values(), "the step to end", every_s=COMMAND_EVERY_S)
    assert "other" in client.steps(job_id).values()
    client.kill_step(job_id, "no such step")


def test_an_unknown_job_is_not_found(client: SlurmClient) -> None:
    assert client.job("99999") is None
    assert client.queue(["99999"]) == {}
    assert client.steps("99999") == {}
    tell = (client.cancel, client.requeue, client.release, client.excluded_nodes)
    for method in tell:
        with pytest.raises(NotFound, match="Invalid job id"):
            method("99999")


def test_a_refusal_passes_on_what_slurm_said(client: SlurmClient, submit: Submit) -> None:
    job_id = submit("sleep 600", "--no-requeue")
    reaches(client, job_id, JobState.RUNNING)
    with pytest.raises(SlurmRefused, match=r"^scontrol update: Job is no longer pending execution") as caught:
        client.update(job_id, Partition="nosuchpartition")
    assert "\n" not in str(caught.value)


def test_the_cluster_is_described(client: SlurmClient, slurm_cluster: SlurmCluster) -> None:
    nodes = client.nodes()
    assert [node.name for node in nodes] == slurm_cluster.node_names
    assert all((node.gpus, node.gpu_type, node.cpus, node.is_usable) == (8, "mi300x", 32, True) for node in nodes)
    (partition,) = client.partitions()
    assert (partition.name, partition.nodes, partition.is_default) == ("batch", "node[0-7]", True)
    assert partition.max_time == timedelta(days=1)
    assert client.scontrol_config()["ClusterName"] == slurm_cluster.instance.cluster_name


def test_without_accounting_there_is_no_history(client: SlurmClient) -> None:
    assert client.history(["1"]) == {}


def test_a_controller_that_is_away_is_one_clear_error(slurm_cluster: SlurmCluster) -> None:
    client = client_of(slurm_cluster, Retries(attempts=1))
    slurm_cluster.stop_controller()
    try:
        with pytest.raises(SlurmUnavailable, match=r"does not answer: .*Unable to contact slurm controller"):
            client.queue()
    finally:
        slurm_cluster.start_controller()
    assert client.queue() is not None


def test_accounting_remembers_every_run_and_what_the_controller_forgot(
    slurm_cluster_with_accounting: SlurmCluster,
) -> None:
    cluster = slurm_cluster_with_accounting
    client = client_of(cluster)
    directory = cluster.user_dir("client-test")
    job_id = cluster.sbatch("[ $SLURM_RESTART_COUNT ] && exit 3; sleep 600", "--requeue", cwd=directory)
    reaches(client, job_id, JobState.RUNNING)
    client.requeue(job_id)
    reaches(client, job_id, JobState.PENDING)
    client.start_in(job_id, RESTART_PAUSE_S)
    reaches(client, job_id, JobState.FAILED)

    wait_for(lambda: not client.queue([job_id]), "the controller to forget the job", every_s=COMMAND_EVERY_S)

    first, second = client.history([job_id])[job_id]
    assert (first.state, first.restarts) == (JobState.REQUEUED, 0)
    assert (second.state, second.restarts, second.exit_code) == (JobState.FAILED, 1, ExitCode(3, 0))
    assert client.job(job_id) == second
    assert client.job("99999") is None
    shutil.rmtree(directory)
