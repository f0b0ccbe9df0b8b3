"""Slurm's environment variables: what a process reads of its job, and which to remove before calling Slurm.

Variables of a job leak into whatever is started from it. sbatch then copies the outer job's CPU binding or node
count into the new job, and srun takes the batch script's task count for a step of another shape. So each kind of
call gets a separate environment.

Other packages read no variable of Slurm by its name (`python -m docs.vocabulary` checks that).
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TypeVar

from zslurm.core.errors import SlurmUnavailable
from zslurm.slurm.hostlist import expand

T = TypeVar("T")

_PREFIXES = ("SLURM_", "SLURMD_", "SBATCH_", "SRUN_", "SALLOC_", "SQUEUE_", "SACCT_", "SINFO_", "SCONTROL_")
_LAUNCHER_PREFIXES = ("PMI_", "PMI2_", "PMIX_")
WHICH_CLUSTER = ("SLURM_CONF", "SLURM_CONF_SERVER")
"""Where a command finds its cluster: a file, or a slurmctld that hands it out (configless sites)."""
_KEPT = {*WHICH_CLUSTER, "SLURM_JWT", "SLURM_SACK_SOCKET", "SLURM_SACK_KEY", "SLURM_SACK_JWKS"}
"""The cluster, and who the user is to it (auth/jwt, auth/slurm): without them a command may find no Slurm."""

_SRUN_INPUTS = frozenset(
    f"SLURM_{name}"
    for name in (
        "BCAST BCAST_EXCLUDE COMPRESS CONSTRAINT CORE_SPEC CPU_BIND CPU_BIND_LIST CPU_BIND_TYPE "
        "CPU_BIND_VERBOSE CPU_FREQ_REQ CPUS_PER_GPU CPUS_PER_TASK DEPENDENCY DIST_PLANESIZE DISTRIBUTION "
        "EPILOG EXACT EXCLUSIVE EXIT_ERROR EXIT_IMMEDIATE EXPORT_ENV GPU_BIND GPU_FREQ GPUS GPUS_PER_NODE "
        "GPUS_PER_SOCKET GPUS_PER_TASK GRES GRES_FLAGS HINT HOSTFILE IMMEDIATE JOB_NAME JOB_NUM_NODES "
        "KILL_BAD_EXIT LABELIO MEM_BIND MEM_BIND_LIST MEM_BIND_PREFER MEM_BIND_SORT MEM_BIND_TYPE "
        "MEM_BIND_VERBOSE MEM_PER_CPU MEM_PER_GPU MEM_PER_NODE MPI_TYPE NETWORK NNODES NO_KILL NPROCS "
        "NTASKS NTASKS_PER_CORE NTASKS_PER_GPU NTASKS_PER_NODE NTASKS_PER_SOCKET OPEN_MODE OVERCOMMIT "
        "OVERLAP PROLOG REMOTE_CWD REQ_SWITCH RESV_PORTS SEND_LIBS SIGNAL SPREAD_JOB STDERRMODE STDINMODE "
        "STDOUTMODE STEP_GRES TASK_EPILOG TASK_PROLOG TASKS_PER_NODE TEST_EXEC THREAD_SPEC THREADS "
        "THREADS_PER_CORE TIMELIMIT TRES_BIND TRES_FREQ TRES_PER_TASK UMASK UNBUFFEREDIO USE_MIN_NODES "
        "WAIT WAIT4SWITCH WORKING_DIR "
        # of options that came until 26.05, and of those that concern the job more than the step
        "ACCOUNT ACCTG_FREQ ARBITRARY_NODELIST BURST_BUFFER CLUSTER_CONSTRAINT CONSOLIDATE_SEGMENTS CONTAINER "
        "CONTAINER_ID CONTAINER_TYPE DEBUG DELAY_BOOT DISABLE_STATUS EXTERNAL_LAUNCHER NCORES_PER_SOCKET "
        "NSOCKETS_PER_NODE NTASKS_PER_TRES OOM_KILL_STEP PARTITION POWER PROFILE QOS RESERVATION SPREAD_SEGMENTS "
        "SRUN_MULTI SRUN_REDUCE_TASK_EXIT_MSG WCKEY"
    ).split()
)
"""What srun reads as options (srun(1), INPUT ENVIRONMENT VARIABLES) besides the job it belongs to."""


def names_to_scrub(environ: Mapping[str, str]) -> list[str]:
    """Return the variables of `environ` that a new submission must not see, sorted: for `env -u NAME ...`."""
    return sorted(
        name for name in environ if name.startswith(_PREFIXES + _LAUNCHER_PREFIXES) and name not in _KEPT
    )


def scrubbed(environ: Mapping[str, str]) -> dict[str, str]:
    """Return a copy without what a surrounding job, step or MPI launcher left.

    What names the cluster and the user stays: SLURM_CONF, SLURM_CONF_SERVER, SLURM_JWT, SLURM_SACK_*.
    """
    removed = set(names_to_scrub(environ))
    return {name: value for name, value in environ.items() if name not in removed}


def step_environment(environ: Mapping[str, str]) -> dict[str, str]:
    """Return a copy for `srun` inside a job: it names the job, but no option of the batch script shapes the step.

    Without this, SLURM_NTASKS of the batch script gives "More processors requested than permitted" in a smaller
    step, and SLURM_MEM_PER_NODE contradicts `--mem-per-cpu`.
    """
    return {
        name: value
        for name, value in environ.items()
        if name not in _SRUN_INPUTS and not name.startswith((*_LAUNCHER_PREFIXES, "SRUN_", "SBATCH_"))
    }


def in_job(command: list[str], job_id: str | None) -> list[str]:
    """Return an srun command for a step of another job; None is the job of this process.

    Its environment is to be `scrubbed`, then: it must name no other job.
    """
    return command if job_id is None else [command[0], f"--jobid={job_id}", *command[1:]]


JOB_VARIABLE = "SLURM_JOB_ID"
NODE_VARIABLE = "SLURMD_NODENAME"
RANK_VARIABLE = "SLURM_PROCID"
HOST_FILE_VARIABLE = "SLURM_HOSTFILE"
"""Names for what a shell reads or sets; Python code calls the functions below."""

_GPU_VARIABLES = ("SLURM_STEP_GPUS", "SLURM_JOB_GPUS", "SLURM_GPUS_ON_NODE")


def own_job_id(environ: Mapping[str, str] = os.environ) -> str | None:
    """Return the id of the Slurm job that this process runs in; None outside of a job."""
    return environ.get(JOB_VARIABLE)


def array_id(environ: Mapping[str, str]) -> str | None:
    """Return the id of the job array that this process runs in; None outside of an array."""
    return environ.get("SLURM_ARRAY_JOB_ID")


def cluster_name(environ: Mapping[str, str]) -> str | None:
    """Return the name of the cluster whose job this process runs in; None outside of a job."""
    return environ.get("SLURM_CLUSTER_NAME")


def restart_count(environ: Mapping[str, str]) -> int:
    """Return how often Slurm has requeued the job of this process."""
    return int(environ.get("SLURM_RESTART_COUNT") or 0)


def partition_of_job(environ: Mapping[str, str]) -> str | None:
    """Return the partition of the job of this process; None outside of a job."""
    return environ.get("SLURM_JOB_PARTITION")


def job_nodes(environ: Mapping[str, str]) -> list[str]:
    """Return the nodes of the job of this process, in Slurm's order; none outside of a job."""
    return expand(environ.get("SLURM_JOB_NODELIST", ""))


def step_id(environ: Mapping[str, str]) -> str | None:
    """Return the id of the step that this process runs in; None outside of a step."""
    return environ.get("SLURM_STEP_ID")


def step_nodes(environ: Mapping[str, str]) -> list[str]:
    """Return the nodes of the step that this process runs in, in Slurm's order; none outside of a step."""
    if step_id(environ) is None:
        return []
    return expand(environ.get("SLURM_STEP_NODELIST") or environ.get("SLURM_JOB_NODELIST", ""))


def node_index(environ: Mapping[str, str]) -> int:
    """Return the number of this node in its step; 0 outside of a step."""
    return int(environ.get("SLURM_NODEID", "0"))


def task_node(environ: Mapping[str, str]) -> str | None:
    """Return the node of this task as Slurm names it; None if no slurmd started this process."""
    return environ.get(NODE_VARIABLE)


def node_name(environ: Mapping[str, str] = os.environ) -> str:
    """Return this node's name as Slurm has it, or the host's short name outside Slurm."""
    return task_node(environ) or os.uname().nodename.split(".")[0]


def gpus_of_slurm(environ: Mapping[str, str]) -> str:
    """Return a variable by which Slurm shows that it gave this process GPUs, as NAME=value; empty without one."""
    for name in _GPU_VARIABLES:
        value = environ.get(name, "").strip()
        if value not in ("", "-1", "(null)", "NoDevFiles") and (name, value) != ("SLURM_GPUS_ON_NODE", "0"):
            return f"{name}={value}"
    return ""


@dataclass(frozen=True)
class StepInfo:
    """A task of a Slurm step: its ranks, and how many tasks there are in the step and on its node."""

    rank: int
    world_size: int
    local_rank: int
    local_world_size: int


def step_info(environ: Mapping[str, str]) -> StepInfo:
    """Read the ranks of this task from Slurm's variables.

    Raises:
        SlurmUnavailable: a variable is missing or not a number: this is no task of a Slurm step.
    """

    def read(name: str, parse: Callable[[str], T]) -> T:
        try:
            return parse(environ.get(name, ""))
        except ValueError as error:
            shown = f"is `{environ[name]}`" if name in environ else "is not set"
            raise SlurmUnavailable(f"not in a Slurm step: {name} {shown}; start tasks with srun") from error

    return StepInfo(
        read("SLURM_PROCID", int),
        read("SLURM_NTASKS", int),
        read("SLURM_LOCALID", int),
        read("SLURM_STEP_TASKS_PER_NODE", expand_counts)[read("SLURM_NODEID", int)],
    )


def expand_counts(text: str) -> tuple[int, ...]:
    """Slurm's counts per node, written out: `8(x2),4` is (8, 8, 4).

    Raises:
        ValueError: the text is not of that form.
    """
    counts: list[int] = []
    for word in text.split(","):
        count, _, repeat = word.removesuffix(")").partition("(x")
        counts += [int(count)] * int(repeat or 1)
    return tuple(counts)
