"""submitit with cluster="zslurm" on a real Slurm, without accounting: functions, arrays, checkpoints, ends."""

from __future__ import annotations

import re
import shutil
from collections.abc import Iterator

import pytest

from tests.checkout import ROOT
from tests.on_slurm.cluster.slurm_cluster import SlurmCluster
from tests.on_slurm.cluster.submitit_user import failure_of, python, result_of, starts_again, submitted
from tests.on_slurm.cluster.user import User, at_work
from tests.waiting import wait_for

pytestmark = pytest.mark.slurm

PAGE = ROOT / "docs" / "submitit.md"


@pytest.fixture
def user(slurm_cluster: SlurmCluster) -> Iterator[User]:
    with at_work(slurm_cluster, "submitit-test") as person:
        yield person


def test_functions_run_on_all_tasks_with_the_profile_s_environment_and_no_secret_is_shown(user: User) -> None:
    found = python(
        user,
        """
        executor.update_parameters(
            nodes=2, tasks_per_node=2, gpus_per_node=2, slurm_partition="batch", slurm_comment="it's mine",
            slurm_setup=["export FROM_SETUP=1"],
            zslurm_overrides=["cluster.env.FROM_PROFILE=2", "cluster.env.HF_TOKEN=hf_abcdefgh"],
        )
        names = ["FROM_SETUP", "FROM_PROFILE", "HF_TOKEN", "NCCL_DEBUG", "SLURM_GPUS_ON_NODE"]
        job = executor.submit(surroundings, *names)
        tasks = job.results()
        comment = job.paths.submission_file.read_text()
        print(json.dumps([tasks, comment, job.task(3).stdout(), job.state]))
        """,
    )
    tasks, script, output, state = found
    assert [task["rank"] for task in tasks] == [0, 1, 2, 3]
    assert {(task["cluster"], task["tasks"], task["nodes"], task["directory"]) for task in tasks} == {
        ("zslurm", 4, 2, str(user.directory))
    }
    assert {tuple(task[name] for name in ("FROM_SETUP", "FROM_PROFILE", "HF_TOKEN")) for task in tasks} == {
        ("1", "2", "hf_abcdefgh")
    }
    assert {task["SLURM_GPUS_ON_NODE"] for task in tasks} == {"2"}
    assert all(task["NCCL_DEBUG"] for task in tasks)  # a rule's
    assert "--gpus-per-node=mi300x:2" in script
    assert "hf_abcdefgh" not in script
    assert "Job completed successfully" in output
    # submitit keeps what it was told for a while, which is older than the result.
    assert state in ("PENDING", "RUNNING", "COMPLETING", "COMPLETED", "UNKNOWN")


def test_the_page_s_program_runs_as_it_is(user: User) -> None:
    (text,) = re.findall(r"^```python submitit\n(.*?)^```$", PAGE.read_text(), re.MULTILINE | re.DOTALL)
    script = user.directory / "page.py"
    script.write_text(text)
    done = user.cluster.run([user.cluster.installation().python, script], cwd=user.directory)
    assert done.stdout.split() == ["1024"]


def test_the_example_runs_as_it_is(user: User) -> None:
    shutil.copy(ROOT / "examples" / "submitit_function.py", user.directory)
    program = [user.cluster.installation().python, "submitit_function.py"]
    printed = user.cluster.run(program, cwd=user.directory).stdout.splitlines()
    assert "(144, " in printed[0]
    assert printed[1] == "array: [0, 1, 4, 9]"


def test_arrays_by_map_and_by_batch_and_a_function_that_fails(user: User) -> None:
    mapped, batched, ids, raised = python(
        user,
        """
        executor.update_parameters(slurm_array_parallelism=2)
        jobs = executor.map_array(add, [1, 2, 3], [10, 20, 30])
        with executor.batch():
            others = [executor.submit(add, number, number) for number in (1, 2)]
            others.append(executor.submit(fail, "on purpose"))
        try:
            others[2].result()
        except utils.FailedJobError as error:
            raised = str(error)
        print(json.dumps([[job.result() for job in jobs], [job.result() for job in others[:2]],
                          [job.job_id for job in jobs], raised]))
        """,
    )
    assert mapped == [11, 22, 33]
    assert batched == [2, 4]
    main = ids[0].partition("_")[0]
    assert ids == [f"{main}_{index}" for index in range(3)]
    assert "ValueError: on purpose" in raised


def test_a_checkpoint_continues_after_the_signal_that_comes_before_the_time_limit(user: User) -> None:
    marks = user.directory / "marks"
    job_id = submitted(user, f"job = executor.submit(Counter({str(marks)!r}), 5)")
    wait_for(lambda: marks.exists() and marks.read_text() == "4", "the function to be under way")
    user.cluster.run(["scancel", "--signal=USR2", job_id])
    starts_again(user, job_id)
    assert result_of(user, job_id) == {"reached": 5, "starts": 2}


@pytest.mark.soak
def test_time_limits_are_counted_and_the_last_one_ends_the_function(user: User) -> None:
    """Slurm's own signal, 50 seconds before the limit of a minute: one requeue is allowed."""
    job_id = submitted(
        user,
        f"""
        executor = submitit.AutoExecutor("logs", cluster="zslurm", slurm_max_num_timeout=1)
        executor.update_parameters(timeout_min=1, slurm_signal_delay_s=50)
        job = executor.submit(Counter({str(user.directory / "marks")!r}), 10**9)
        """,
    )
    starts_again(user, job_id)
    assert "timed-out too many times" in failure_of(user, job_id)


def test_a_job_that_is_cancelled_ends_its_result_without_accounting(user: User) -> None:
    state, raised = python(
        user,
        """
        job = executor.submit(endless)
        while job.watcher.get_state(job.job_id, mode="force") != "RUNNING":
            time.sleep(0.3)
        job.cancel()
        while not job.done(force_check=True):
            time.sleep(0.3)
        job._results_timeout_s = 0
        print(json.dumps([job.state, str(job.exception())]))
        """,
    )
    assert state == "CANCELLED"
    assert "has not produced any output (state: CANCELLED)" in raised


def test_a_refused_job_is_one_line_and_an_error_of_both_families(user: User) -> None:
    (line, kinds, left) = python(
        user,
        """
        import pathlib
        executor.update_parameters(slurm_partition="nowhere")
        try:
            executor.submit(add, 1, 2)
        except utils.FailedJobError as error:
            print(json.dumps([str(error), [kind.__name__ for kind in type(error).__mro__],
                              [path.name for path in pathlib.Path("logs").iterdir()]]))
        """,
    )
    assert line.startswith("sbatch refused the job: ")
    assert "invalid partition specified: nowhere" in line
    assert "\n" not in line
    assert {"SlurmRefused", "ZslurmError"} <= set(kinds)
    assert left == []
