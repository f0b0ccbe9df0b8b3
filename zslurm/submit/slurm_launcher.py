"""Submit a run as a Slurm job: submitit's flow, our script.

submitit pickles one call (the supervisor of the run), writes the script that we render, calls sbatch and puts
the pickle where the job looks for it. Three seams are used: the text of the script, the sbatch command (where
the environment is scrubbed) and `affinity`. Its job states, arrays and signal handlers are not used.
"""

from __future__ import annotations

import contextlib
import io
import os
import shutil
from pathlib import Path
from typing import Any

import submitit
from submitit.core import utils

from zslurm.aegis.supervisor.supervisor import supervise
from zslurm.config.spec import RunSpec
from zslurm.core.errors import ConfigError, SlurmRefused, SlurmUnavailable, ZslurmError
from zslurm.run.run_dir import RunDir
from zslurm.slurm.client import SlurmClient
from zslurm.slurm.environment import names_to_scrub
from zslurm.slurm.version import OVERLAP_SHARES_GPUS
from zslurm.submit.script.render import JobScript


class _Executor(submitit.SlurmExecutor):
    """submitit's Slurm executor with our script and a scrubbed environment around sbatch."""

    def __init__(self, script: JobScript, run: RunDir) -> None:
        super().__init__(folder=run.submitit)
        self._script = script

    @classmethod
    def affinity(cls) -> int:
        return 2

    def _make_submission_file_text(self, command: str, uid: str) -> str:
        return self._script.text  # with the Python of the job, which need not be this one

    def _make_submission_command(self, submission_file_path: Path) -> list[str]:
        scrub = [word for name in names_to_scrub(os.environ) for word in ("-u", name)]
        return ["env", *scrub, "sbatch", str(submission_file_path)]

    def _num_tasks(self) -> int:
        return 1


def check_slurm(spec: RunSpec) -> None:
    """Check that there is a Slurm here that can do what the run wants.

    Raises:
        SlurmUnavailable: there is no sbatch here.
        ConfigError: this Slurm is too old.
    """
    if shutil.which("sbatch") is None:
        raise SlurmUnavailable(
            "sbatch: not found on this machine; submit from a login node, or use --cluster local to train here"
        )
    if spec.outlives_nodes and (version := SlurmClient().version()) < OVERLAP_SHARES_GPUS:
        raise ConfigError(
            "slurm.spares and aegis.min_nodes: need Slurm 22.05 or newer, where steps can share a job's GPUs; "
            f"this is {version}; leave them out, and a failed node costs a requeue"
        )


def submit_to_slurm(script: JobScript, run: RunDir) -> tuple[str, dict[str, Any]]:
    """Submit; returns the job id, and nothing that would hold a local run.

    Raises:
        SlurmUnavailable: the controller does not answer.
        SlurmRefused: sbatch refused the job; its message is passed on.
    """
    try:
        # submitit passes sbatch's complaints on while it runs; they come in one line, below.
        with contextlib.redirect_stderr(io.StringIO()):
            job: submitit.Job[Any] = _Executor(script, run).submit(supervise, str(run.path))
    except OSError as error:
        raise ZslurmError(f"{error.filename or run.submitit}: cannot be written: {error.strerror}") from error
    except utils.FailedJobError as error:
        raise _refusal(str(error)) from error
    return str(job.job_id), {}


def _refusal(text: str) -> SlurmRefused | SlurmUnavailable:
    """Return the error that sbatch's message in submitit's error means."""
    lines = [line.strip() for line in text.splitlines() if line.strip().startswith("sbatch:")]
    words = "; ".join(line.removeprefix("sbatch: ").removeprefix("error: ") for line in lines)
    unreachable = ("Unable to contact slurm controller", "Socket timed out", "Could not establish a configuration")
    if any(phrase in text for phrase in unreachable):
        return SlurmUnavailable(f"sbatch: the Slurm controller does not answer: {words}")
    return SlurmRefused(f"sbatch refused the job: {words or ' '.join(text.split())}")
