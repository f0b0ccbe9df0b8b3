"""Submit a run as a Slurm job: submitit's flow, our script.

submitit pickles one call (the supervisor of the run), writes the script that we render, calls sbatch and puts
the pickle where the job looks for it. The executor is the submitit plugin's (submit/plugin), with the
script of the run. submitit's job states, arrays and signal handlers are not used.
"""

from __future__ import annotations

import shutil
from typing import Any

import submitit

from zslurm.aegis.supervisor.supervisor import supervise
from zslurm.config.spec import RunSpec
from zslurm.core.errors import ConfigError, SlurmUnavailable
from zslurm.run.run_dir import RunDir
from zslurm.slurm.client import SlurmClient
from zslurm.slurm.version import why_not_bound_by_rank, why_not_shared
from zslurm.submit.plugin.executor import ZslurmExecutor
from zslurm.submit.script.render import JobScript


class _RunExecutor(ZslurmExecutor):
    """Submits the supervisor of a run, with the script that the run was checked with."""

    def __init__(self, script: JobScript, run: RunDir) -> None:
        super().__init__(folder=run.submitit)
        self._script = script

    @classmethod
    def affinity(cls) -> int:
        return 2  # `check_slurm` has looked for Slurm

    def _make_submission_file_text(self, command: str, uid: str) -> str:
        return self._script.text  # with the Python of the job, which need not be this one

    def _num_tasks(self) -> int:
        return 1  # the supervisor starts the ranks

    def _minutes(self) -> int:
        return 0  # the supervisor knows the time limit of its job


def check_slurm(spec: RunSpec) -> None:
    """Check that there is a Slurm here that can do what the run wants.

    Raises:
        SlurmUnavailable: there is no sbatch here.
        ConfigError: this Slurm is too old, or no longer has an option, or another scheduler lacks some.
    """
    if shutil.which("sbatch") is None:
        raise SlurmUnavailable(
            "sbatch: not found on this machine; submit from a login node, or use --cluster local to train here"
        )
    if why := SlurmClient().why_not_slurm():
        raise ConfigError(f"{why}: a run needs them; use a Slurm, or --cluster local on one node")
    if spec.outlives_nodes and (why := why_not_shared(SlurmClient().version())):
        raise ConfigError(
            f"slurm.spares and aegis.min_nodes: {why}; leave them out, and a failed node costs a requeue"
        )
    binds_by_rank = "rank" in spec.slurm.cpu_bind.lower().split(",")
    if binds_by_rank and (why := why_not_bound_by_rank(SlurmClient().version())):
        raise ConfigError(
            f"slurm.cpu_bind: {why}; list the cores with map_cpu:..., or use gpu: then each rank is bound to the "
            "cores of its GPU"
        )


def submit_to_slurm(script: JobScript, run: RunDir) -> tuple[str, dict[str, Any]]:
    """Submit; returns the job id, and nothing that would hold a local run.

    Raises:
        SlurmUnavailable: the controller does not answer.
        SlurmRefused: sbatch refused the job; its message is passed on.
        ZslurmError: the run directory cannot be written.
    """
    job: submitit.Job[Any] = _RunExecutor(script, run).submit(supervise, str(run.path))
    return str(job.job_id), {}
