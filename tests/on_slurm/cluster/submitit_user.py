"""An ordinary user who submits functions with submitit, each time from a new program."""

from __future__ import annotations

import json
import shutil
import textwrap
from typing import Any

from tests.on_slurm.cluster import submitit_functions
from tests.on_slurm.cluster.as_user import COMMAND_EVERY_S
from tests.on_slurm.cluster.user import User
from tests.waiting import wait_for

_BEGIN = """
import json, sys, time
import submitit
from submitit.core import utils
from submitit_functions import Counter, add, endless, fail, surroundings

executor = submitit.AutoExecutor("logs", cluster="zslurm", slurm_max_num_timeout=2)
executor.update_parameters(timeout_min=5)
"""


def python(user: User, text: str) -> Any:
    """Run a program of the user's; returns the JSON of its last line."""
    shutil.copy(submitit_functions.__file__, user.directory)
    script = user.directory / "program.py"
    script.write_text(_BEGIN + textwrap.dedent(text))
    return json.loads(user.cluster.program(script).stdout.splitlines()[-1])


def submitted(user: User, text: str) -> str:
    """Submit with `text`, which leaves `job`; returns the id, while the job continues."""
    return str(python(user, textwrap.dedent(text) + "\nprint(json.dumps(job.job_id))"))


def starts_again(user: User, job_id: str) -> None:
    """Lift the two minutes for which Slurm holds a requeued job back; earlier than this Slurm sets it again."""

    def lifted() -> bool:
        shown = user.cluster.run(["squeue", "--noheader", "-j", job_id, "-o", "%T"]).stdout.strip()
        if shown == "PENDING":
            user.cluster.run_as_root(["scontrol", "update", f"JobId={job_id}", "StartTime=now+3"])
        return shown == "PENDING"

    wait_for(lifted, f"job {job_id} to be let start", every_s=COMMAND_EVERY_S)


def result_of(user: User, job_id: str, folder: str = "logs") -> Any:
    """The result of a job that was submitted by another program."""
    return python(
        user,
        f"""
        from zslurm.submit.plugin.job import ZslurmJob
        print(json.dumps(ZslurmJob({folder!r}, {job_id!r}).result()))
        """,
    )


def failure_of(user: User, job_id: str, folder: str = "logs") -> str:
    """The message of the error that a job ends with."""
    text = f"""
        from zslurm.submit.plugin.job import ZslurmJob
        print(json.dumps(str(ZslurmJob({folder!r}, {job_id!r}).exception())))
        """
    return str(python(user, text))
