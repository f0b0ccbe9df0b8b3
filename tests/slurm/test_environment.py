"""What one Slurm command sees of another's variables, and what a task reads of itself."""

from __future__ import annotations

import pytest

from tests.slurm.recordings import recorded
from zslurm.core.errors import SlurmUnavailable
from zslurm.slurm.environment import (
    StepInfo,
    expand_counts,
    job_nodes,
    names_to_scrub,
    node_index,
    own_job_id,
    partition_of_job,
    restart_count,
    scrubbed,
    step_environment,
    step_id,
    step_info,
    step_nodes,
    task_node,
)


def variables(text: str) -> dict[str, str]:
    return dict(line.split("=", 1) for line in text.splitlines())


BATCH = variables(recorded.BATCH_ENVIRONMENT) | {"HOME": "/home/somebody"}
TASK = variables(recorded.TASK_ENVIRONMENT)


def test_a_submission_sees_where_the_cluster_is_and_nothing_of_a_job_around_it() -> None:
    environment = BATCH | {"SBATCH_PARTITION": "old", "PMIX_RANK": "0", "PMI_RANK": "0", "SRUN_DEBUG": "3"}
    assert scrubbed(environment) == {"HOME": "/home/somebody", "SLURM_CONF": BATCH["SLURM_CONF"]}
    removed = names_to_scrub(environment)
    assert removed == sorted(set(environment) - {"HOME", "SLURM_CONF"})


def test_a_configless_cluster_and_slurms_own_authentication_stay() -> None:
    """Without slurm.conf, a command finds its cluster and its user through these alone."""
    names = ("SLURM_CONF_SERVER", "SLURM_SACK_SOCKET", "SLURM_SACK_KEY", "SLURM_SACK_JWKS", "SLURM_JWT")
    kept = dict.fromkeys(names, "x")
    assert scrubbed(kept | {"SLURM_NNODES": "2"}) == kept
    assert step_environment(kept | {"SLURM_NNODES": "2"}) == kept


def test_no_variable_of_an_option_of_a_newer_srun_reaches_a_step() -> None:
    names = (
        "SLURM_CONSOLIDATE_SEGMENTS", "SLURM_SPREAD_SEGMENTS", "SLURM_EXTERNAL_LAUNCHER", "SLURM_CONTAINER",
        "SLURM_OOM_KILL_STEP", "SLURM_SRUN_REDUCE_TASK_EXIT_MSG", "SLURM_GRES", "SLURM_GPUS_PER_NODE",
    )  # fmt: skip
    job = {"SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": "node[0-1]"}
    assert step_environment(job | dict.fromkeys(names, "x")) == job


def test_a_step_sees_its_job_but_no_shape_of_the_batch_script() -> None:
    environment = step_environment(BATCH | {"SLURM_CPU_BIND": "mask_cpu:0x3", "PMIX_RANK": "0"})
    assert {"SLURM_JOB_ID", "SLURM_JOBID", "SLURM_CONF", "SLURM_JOB_NODELIST", "HOME"} <= set(environment)
    shaping = {
        "SLURM_NTASKS",
        "SLURM_NPROCS",
        "SLURM_NTASKS_PER_NODE",
        "SLURM_GPUS_PER_NODE",
        "SLURM_MEM_PER_NODE",
    }
    shaping |= {"SLURM_CPUS_PER_TASK", "SLURM_GPU_BIND", "SLURM_DISTRIBUTION", "SLURM_NNODES", "SLURM_CPU_BIND"}
    assert not shaping & set(environment)
    assert "PMIX_RANK" not in environment


def test_a_task_reads_its_ranks() -> None:
    assert step_info(TASK) == StepInfo(rank=3, world_size=4, local_rank=1, local_world_size=2)


@pytest.mark.parametrize("name", ["SLURM_PROCID", "SLURM_STEP_TASKS_PER_NODE", "SLURM_NODEID"])
def test_outside_a_step_the_missing_variable_is_named(name: str) -> None:
    environment = {key: value for key, value in TASK.items() if key != name}
    with pytest.raises(SlurmUnavailable, match=f"{name} is not set"):
        step_info(environment)


def test_counts_per_node_are_written_out() -> None:
    assert expand_counts("8(x3),4") == (8, 8, 8, 4)


def test_a_task_reads_its_job_its_step_and_its_node() -> None:
    task = TASK | {"SLURM_RESTART_COUNT": "2"}
    assert (own_job_id(task), step_id(task), task_node(task)) == ("1", "0", "node1")
    assert (job_nodes(task), step_nodes(task), node_index(task)) == (["node0", "node1"], ["node0", "node1"], 1)
    assert (partition_of_job(task), restart_count(task)) == ("batch", 2)


def test_a_batch_script_is_in_a_job_and_in_no_step() -> None:
    assert (own_job_id(BATCH), restart_count(BATCH), job_nodes(BATCH)) == ("1", 0, ["node0", "node1"])
    assert (step_id(BATCH), step_nodes(BATCH)) == (None, [])


def test_outside_of_a_job_nothing_is_known() -> None:
    assert (own_job_id({}), step_id({}), task_node({}), partition_of_job({})) == (None, None, None, None)
    assert (job_nodes({}), step_nodes({}), node_index({}), restart_count({})) == ([], [], 0, 0)
