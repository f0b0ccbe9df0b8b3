"""Slurm steps, or local processes, of warm processes: they wait to take the place of a rank that is lost.

A warm process (`python -m zslurm.job.in_memory.warm_rank RUN_DIR ATTEMPT`) has imported torch, read the
configuration and built the model. Its name among the members is NODE/wK; a step numbers its processes on from
`first`, in the order of its tasks. The step has the name of the ranks' step, so whatever ends that one ends these
as well.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

from zslurm.config.spec import RunSpec
from zslurm.job.numa_bind import bind_variable
from zslurm.job.preparation.interpreter import Interpreter
from zslurm.job.step import ATTEMPT_VARIABLE, StepPlan, attempt_mark, step_name
from zslurm.run.run_dir import AttemptDir, RunDir
from zslurm.slurm.environment import NODE_VARIABLE, RANK_VARIABLE, in_job, scrubbed, step_environment
from zslurm.slurm.hostlist import compress
from zslurm.train.recovery.generation import MEMBER_VARIABLE, RECOVERY_VARIABLE, member_name

HELPER_VARIABLE = "ZSLURM_HELPER"
"""Environment variable of warm processes with the helper job that they are in."""

# As for ranks: a signal to the whole job must not end what has no handlers yet.
_NAMED = (
    "trap '' HUP INT TERM USR1 USR2; first=$1; shift; "
    f'export {MEMBER_VARIABLE}="${NODE_VARIABLE}/w$((first + {RANK_VARIABLE}))"; exec "$@"'
)


def warm_name(node: str, first: int, task: int) -> str:
    """Return the member's name of a task of a step whose processes are numbered from `first`."""
    return member_name(node, f"w{first + task}")


def outliving(plan: StepPlan, spec: RunSpec) -> StepPlan:
    """Return the ranks' step for recovery in memory: it outlives a lost task and a lost node."""
    command = list(plan.command)
    if command[0] == "srun":
        command[1:1] = ["--no-kill", "--wait=0"]
    return StepPlan(command, plan.env | {RECOVERY_VARIABLE: spec.aegis.recovery})


def next_to_ranks(
    spec: RunSpec, python: Interpreter, nodes: Sequence[str], *, per_node: int, name: str
) -> list[str]:
    """Return srun and its options for a step with what each rank of a node has, next to whatever runs there."""
    return [
        "srun",
        f"--job-name={name}",
        f"--nodes={len(nodes)}",
        f"--nodelist={compress(nodes)}",
        f"--ntasks={len(nodes) * per_node}",
        f"--ntasks-per-node={per_node}",
        f"--cpus-per-task={spec.cpus_per_task}",
        f"--cpu-bind={spec.srun_cpu_bind}",
        "--distribution=block:block",
        "--overlap",
        "--mem=0",
        "--kill-on-bad-exit=0",
        "--no-kill",
        "--wait=0",
        "--unbuffered",
        "--input=none",
        *spec.cluster.srun_gpu_options(),
        *spec.srun_network_options,
        *python.srun_options,
    ]


def warm_slurm_step(
    spec: RunSpec,
    run: RunDir,
    attempt: AttemptDir,
    python: Interpreter,
    nodes: Sequence[str],
    *,
    per_node: int,
    first: int,
    helper: str | None = None,
) -> StepPlan:
    """Return a step with `per_node` warm processes on each of these nodes, next to whatever runs there.

    With `helper` the nodes are those of that helper job.
    """
    command = [
        *next_to_ranks(spec, python, nodes, per_node=per_node, name=step_name(attempt)),
        f"--output={attempt.logs}/warm-{first:05d}-%t.log",
        "/bin/sh",
        "-c",
        _NAMED,
        "zslurm-warm",
        str(first),
        *_command(run, attempt, python),
    ]
    environ = step_environment(python.environ)
    if helper is not None:
        environ = scrubbed(python.environ) | {HELPER_VARIABLE: helper}
    return StepPlan(
        in_job(command, helper), environ | bind_variable(spec) | {RECOVERY_VARIABLE: spec.aegis.recovery}
    )


def warm_local_step(
    spec: RunSpec, run: RunDir, attempt: AttemptDir, python: Interpreter, node: str, *, per_node: int, first: int
) -> StepPlan:
    """Return the same for this machine, whose name among the members is `node`."""
    named = _NAMED.replace(f"${NODE_VARIABLE}", node).replace(RANK_VARIABLE, "RANK")
    # The local launcher numbers what it starts as ranks; these are none yet.
    unset = ["env", *(f"--unset={name}" for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"))]
    command = [
        sys.executable, "-u", "-m", "zslurm.job.local_step",
        f"--ranks={per_node}", f"--output={attempt.logs}", f"--name=warm-{first:05d}", "--",
        "/bin/sh", "-c", named, "zslurm-warm", str(first), *unset, *_command(run, attempt, python),
    ]  # fmt: skip
    return StepPlan(command, dict(python.environ) | {RECOVERY_VARIABLE: spec.aegis.recovery})


def _command(run: RunDir, attempt: AttemptDir, python: Interpreter) -> list[str]:
    mark = ["env", f"{ATTEMPT_VARIABLE}={attempt_mark(attempt)}"]
    return [
        *mark,
        *python.command,
        "-u",
        "-m",
        "zslurm.job.in_memory.warm_rank",
        str(run.path),
        str(attempt.number),
    ]
