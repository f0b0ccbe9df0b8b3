"""Start a run on this machine: the same supervisor and ranks, through submitit's local executor.

A local run detaches as a Slurm job does: it has a separate session, and closing the terminal or pressing
Ctrl-C elsewhere does not reach it.
"""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
from dataclasses import asdict
from typing import Any

import submitit

from zslurm.aegis.supervisor.supervisor import supervise
from zslurm.core.processes import ProcessRecord
from zslurm.run.index import claim_local_id
from zslurm.run.run_dir import RunDir
from zslurm.submit.script.render import JobScript

# submitit's controller stops its task after a time: ours ends by itself.
_TEN_YEARS_S = 10 * 365 * 24 * 3600


class _Executor(submitit.LocalExecutor):
    """submitit's local executor; its controller runs our script, in a separate session."""

    def __init__(self, run: RunDir, job_id: str) -> None:
        super().__init__(folder=run.submitit)
        self._script, self._job_id = run.script, job_id

    def _submit_command(self, command: str) -> submitit.LocalJob[Any]:
        environment = {
            **os.environ,
            "ZSLURM_JOB_ID": self._job_id,
            "SUBMITIT_EXECUTOR": "local",
            "SUBMITIT_LOCAL_NTASKS": "1",
            "SUBMITIT_LOCAL_JOB_NUM_NODES": "1",
            "SUBMITIT_LOCAL_NODEID": "0",
            "SUBMITIT_LOCAL_COMMAND": shlex.join(["/bin/bash", str(self._script)]),
            "SUBMITIT_LOCAL_TIMEOUT_S": str(_TEN_YEARS_S),
            "SUBMITIT_LOCAL_SIGNAL_DELAY_S": "0",
            "SUBMITIT_LOCAL_WITH_SHELL": "",
            "SUBMITIT_STDERR_TO_STDOUT": "1",
        }
        process = subprocess.Popen(
            [sys.executable, "-P", "-m", "submitit.local._local", str(self.folder)],
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        return submitit.LocalJob(folder=self.folder, job_id=str(process.pid), process=process, tasks=[0])


def _forget_calls(run: RunDir) -> None:
    """Remove the pickled calls of earlier local submissions.

    submitit names them by the pid of its process, and pids are used again: the process of this submission would
    take an old call for its own, in a moved or copied directory one that names the old location.
    """
    for pattern in ("*_submitted.pkl", "*_result.pkl"):
        for path in run.submitit.glob(pattern):
            path.unlink(missing_ok=True)


def submit_here(_: JobScript, run: RunDir) -> tuple[str, dict[str, Any]]:
    """Start the script, as its run keeps it; returns its job id, `local-N`, and the record of its process."""
    job_id = claim_local_id(run)
    _forget_calls(run)
    job = _Executor(run, job_id).submit(supervise, str(run.path))
    return job_id, asdict(ProcessRecord.of(int(job.job_id)))
