"""One long-running task on each node that reads from and writes to the program that started it, through srun.

What the program writes to the tasks' stdin reaches all of them; what they print comes back in lines of at most
1,024 characters, from all nodes together. From a login node it is a job; inside a job, a step of it.
"""

from __future__ import annotations

import os
import secrets
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from zslurm.core.errors import SlurmUnavailable
from zslurm.slurm.environment import scrubbed, step_environment
from zslurm.slurm.hostlist import compress
from zslurm.slurm.on_nodes.run_on_nodes import SETUP_VARIABLE, cancel_named, end_srun
from zslurm.slurm.run_command import SlurmCommands


@dataclass(frozen=True)
class NodeTasks:
    """The tasks of one call.

    Attributes:
        process: srun, with its pipes.
        name: of the job; None inside a job.
    """

    process: subprocess.Popen[str]
    name: str | None
    environ: Mapping[str, str]

    def end(self) -> None:
        """End the tasks, and the job if it was made for them."""
        if end_srun(self.process) and self.name is not None:
            cancel_named(self.name, self.environ)


def start_on_nodes(
    module: str,
    *,
    nodes: Sequence[str] = (),
    count: int | None = None,
    options: Sequence[str] = (),
    job_id: str | None = None,
    setup: Sequence[str] = (),
    environ: Mapping[str, str] = os.environ,
    prefix: str = "zslurm-",
    python: Sequence[str] = (sys.executable,),
) -> NodeTasks:
    """Start `python -m MODULE` once on each node.

    Args:
        module: reads stdin to its end.
        nodes: exactly these.
        count: how many of Slurm's choice, if none are named.
        options: further options of srun (partition, account, GPUs, ...).
        job_id: as a step of this job, which this process runs in; default: as a separate job.
        setup: shell lines that each node runs first.
        environ: the environment to start from.
        prefix: what the job's name begins with.
        python: the words that start Python on a node, such as one inside a container.

    Raises:
        SlurmUnavailable: there is no srun.
    """
    program = SlurmCommands(environ).find("srun")
    if program is None:
        raise SlurmUnavailable("srun: not found on PATH; run this on a machine of the Slurm cluster")
    n_nodes, name = len(nodes) or count or 1, f"{prefix}{secrets.token_hex(4)}"
    command = [program, f"--nodes={n_nodes}", f"--ntasks={n_nodes}", "--ntasks-per-node=1", "--cpu-bind=none"]
    command += ["--no-kill", "--kill-on-bad-exit=0", "--wait=0", f"--job-name={name}"]
    command += [f"--nodelist={compress(nodes)}"] if nodes else []
    command += [f"--jobid={job_id}", "--overlap", "--mem=0"] if job_id is not None else []
    shell = ["/bin/bash", "-c", f'eval "${SETUP_VARIABLE}"; exec "$@"', "zslurm-nodes"] if setup else []
    command += [*options, *shell, *python, "-P", "-m", module]
    env = dict(scrubbed(environ) if job_id is None else step_environment(environ))
    env |= {SETUP_VARIABLE: "\n".join(setup)} if setup else {}
    process = subprocess.Popen(
        command, env=env, text=True, errors="replace", bufsize=1, stdin=subprocess.PIPE,
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, start_new_session=True,
    )  # fmt: skip
    return NodeTasks(process, name if job_id is None else None, environ)


def start_here(
    module: str, environ: Mapping[str, str] = os.environ, python: Sequence[str] = (sys.executable,)
) -> NodeTasks:
    """Start the same on this machine, without Slurm; it ends with its stdin."""
    process = subprocess.Popen(
        [*python, "-P", "-m", module], env=dict(scrubbed(environ)), text=True, errors="replace", bufsize=1,
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, start_new_session=True,
    )  # fmt: skip
    return NodeTasks(process, None, environ)
