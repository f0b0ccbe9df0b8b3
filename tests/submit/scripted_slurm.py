"""Slurm's commands as scripts that answer what the real ones were recorded to say: for what needs no job to run.

tests/on_slurm has the real ones. PATH holds nothing else but what a submission itself calls.
"""

from __future__ import annotations

import shlex
import shutil
from pathlib import Path

import pytest

from tests.slurm.recordings import recorded
from zslurm.slurm.run_command import Retries

RUNNING, CANCELLED, FORGOTTEN = "4", "6", "999"
"""Jobs of recorded.SQUEUE, and one that the controller does not know any more."""

# sbatch 22.05.8 where slurm.conf names a controller that does not listen
NO_CONTROLLER = (
    "sbatch: error: Batch job submission failed: Unable to contact slurm controller (connect failure)\n"
)
# sbatch --time=soon
BAD_TIME = "sbatch: error: Invalid --time specification\n"
# sbatch --nodes=9 on eight nodes, since 24.11
TOO_MANY_NODES = "sbatch: error: Batch job submission failed: Requested node configuration is not available\n"


class ScriptedSlurm:
    """Scripts in a directory that is the whole PATH; what must be repeated is repeated without a pause."""

    def __init__(self, directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.directory = directory
        directory.mkdir()
        for program in ("env", "git", "cat", "sh"):
            (directory / program).symlink_to(shutil.which(program) or "")
        monkeypatch.setenv("PATH", str(directory))
        monkeypatch.setattr(Retries, "pause_after", lambda self, attempt: 0.0)
        self.gives(FORGOTTEN)

    def gives(self, job_id: str) -> None:
        """sbatch accepts, and squeue says of the job what it was recorded to say."""
        self.write_program(
            "sbatch",
            f'cat "$1" > {self.directory}/submitted; env > {self.directory}/seen\n'
            f"echo Submitted batch job {job_id}",
        )
        known = job_id != FORGOTTEN
        text = recorded.SQUEUE if known else recorded.UNKNOWN_JOB
        self.write_program("squeue", f"printf %s {shlex.quote(text)} {'' if known else '>&2; exit 1'}")

    def says_version(self, version: str) -> None:
        """Slurm is of this version, and accepts."""
        self.write_program("squeue", f"echo {shlex.quote(version)}")
        self.write_program(
            "sbatch",
            f'[ "$1" = --version ] && echo {shlex.quote(version)} && exit; echo Submitted batch job {FORGOTTEN}',
        )

    def refuses(self, message: str) -> None:
        """sbatch says no."""
        self.write_program("sbatch", f"printf %s {shlex.quote(message)} >&2; exit 1")

    @property
    def submitted(self) -> str:
        """The script that sbatch got last."""
        return (self.directory / "submitted").read_text()

    @property
    def seen(self) -> list[str]:
        """The environment that sbatch saw."""
        return (self.directory / "seen").read_text().splitlines()

    def write_program(self, program: str, script: str) -> None:
        path = self.directory / program
        path.write_text(f"#!/bin/sh\n{script}\n")
        path.chmod(0o755)
