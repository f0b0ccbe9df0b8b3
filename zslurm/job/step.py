"""The step that holds the ranks: an srun on Slurm, the local launcher elsewhere.

Both run in a separate session with their output in files, so the supervisor that started them may die and
its successor finds them again.
"""

from __future__ import annotations

import signal
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass

from zslurm.config.spec import RunSpec
from zslurm.core.errors import ZslurmError
from zslurm.core.processes import DetachedProcess
from zslurm.job.numa_bind import bind_variable
from zslurm.job.preparation.interpreter import Interpreter
from zslurm.run.run_dir import AttemptDir, RunDir
from zslurm.slurm.client import SlurmClient
from zslurm.slurm.environment import HOST_FILE_VARIABLE, step_environment
from zslurm.slurm.hostlist import compress

ATTEMPT_VARIABLE = "ZSLURM_RUN_ATTEMPT"
"""Environment variable of every rank, which all that it starts inherits: whose attempt a process belongs to."""

_SRUN_ENDS_S = 60.0


@dataclass(frozen=True)
class StepPlan:
    """How the ranks of one attempt are started."""

    command: list[str]
    env: dict[str, str]

    def start(self, attempt: AttemptDir) -> DetachedProcess:
        """Start the step.

        Raises:
            OSError: a file in the attempt's directory cannot be written.
        """
        return DetachedProcess.start(
            self.command,
            env=self.env,
            log=attempt.step_log,
            record_file=attempt.step_process,
            exit_file=attempt.step_exit,
        )


def attempt_mark(attempt: AttemptDir) -> str:
    """Value of ATTEMPT_VARIABLE."""
    return str(attempt.path.absolute())


def _rank_command(spec: RunSpec, run: RunDir, attempt: AttemptDir, python: Interpreter) -> list[str]:
    # Set here and not in the environment of the step, or the process that holds the ranks would bear it too.
    mark = ["env", f"{ATTEMPT_VARIABLE}={attempt_mark(attempt)}"]
    module = "zslurm.job.rank" if spec.trainer is None else "zslurm.job.program.rank"
    return [*mark, *python.command, "-u", "-m", module, str(run.path), str(attempt.number)]


def step_name(attempt: AttemptDir) -> str:
    """Slurm's name for the step of an attempt."""
    return f"attempt-{attempt.number}"


def local_step(spec: RunSpec, run: RunDir, attempt: AttemptDir, python: Interpreter) -> StepPlan:
    """Return the step whose ranks run on this machine."""
    command = [
        sys.executable, "-u", "-m", "zslurm.job.local_step",
        f"--ranks={spec.world_size}", f"--output={attempt.logs}", "--",
        *_rank_command(spec, run, attempt, python),
    ]  # fmt: skip
    return StepPlan(command, dict(python.environ))


def slurm_step(
    spec: RunSpec, run: RunDir, attempt: AttemptDir, python: Interpreter, nodes: Sequence[str]
) -> StepPlan:
    """Return the step whose ranks run on these nodes of this process's Slurm job; the others stay idle.

    The step shares its nodes with other steps of the job: with the agents, and with what a dead node's step before
    it still holds in Slurm's books.
    """
    command = [
        "srun",
        f"--job-name={step_name(attempt)}",
        f"--nodes={len(nodes)}",
        f"--nodelist={compress(nodes)}",
        f"--ntasks={len(nodes) * spec.ranks_per_node}",
        f"--ntasks-per-node={spec.ranks_per_node}",
        f"--cpus-per-task={spec.cpus_per_task}",
        f"--cpu-bind={spec.srun_cpu_bind}",
        "--distribution=block:block",
        "--overlap",
        "--mem=0",
        "--kill-on-bad-exit=0",
        "--unbuffered",
        "--input=none",
        f"--output={attempt.logs}/rank-%5t.log",
        *spec.cluster.srun_gpu_options(),
        *spec.srun_network_options,
        *python.srun_options,
    ]
    # Slurm sends signals to every process of the step, at the start of a grace time for one. The ranks ignore them
    # until they have handlers; until then they would be killed.
    masked = ["/bin/sh", "-c", "trap '' HUP INT TERM USR1 USR2; exec \"$@\"", "zslurm-rank"]
    return StepPlan(
        [*command, *masked, *_rank_command(spec, run, attempt, python)],
        step_environment(python.environ) | bind_variable(spec),
    )


def in_order(plan: StepPlan, attempt: AttemptDir, nodes: Sequence[str], ranks_per_node: int) -> StepPlan:
    """Return the same Slurm step with its ranks on its nodes in this order, the first node's first.

    srun sorts every list of nodes that it is given. Only a file with one line for each task decides the order.
    The file also says how many nodes there are: since 23.11 srun refuses `--nodes` together with it.

    Raises:
        OSError: the file cannot be written.
    """
    lines = [node for node in nodes for _ in range(ranks_per_node)]
    attempt.hostfile.write_text("\n".join(lines) + "\n", encoding="utf-8")
    order = "--distribution=arbitrary"
    options = [word for word in plan.command if not word.startswith(("--nodes=", "--nodelist="))]
    command = [order if option.startswith("--distribution=") else option for option in options]
    return StepPlan(command, plan.env | {HOST_FILE_VARIABLE: str(attempt.hostfile)})


def kill_step(process: DetachedProcess, attempt: AttemptDir, job_id: str | None) -> None:
    """End every task of the step now, if it has any left.

    On Slurm the tasks are not children of srun: Slurm ends them. On nodes without squeue and scancel srun is asked
    to do so; killed, it would leave them behind.
    """
    if job_id is not None:
        try:
            SlurmClient().kill_step(job_id, step_name(attempt))
        except ZslurmError:  # not there, away, or it refuses
            process.signal_group(signal.SIGTERM)
            deadline = time.monotonic() + _SRUN_ENDS_S
            while process.poll() is None and time.monotonic() < deadline:
                process.reap()
                time.sleep(0.1)
    process.signal_group(signal.SIGKILL)
