"""Run generated programs, none of which is trusted: with limits, without a network, and so that nothing is left.

    sandbox = open_sandbox(task.config.execution, "task.yaml")   # or a DataError: what this machine does not allow
    run = sandbox.run("print(1)")                                 # run.passed: the command's exit code was 0

Each program is a file in a folder of its own, which is the command's working folder. `launcher.py` does the work
on Linux, in namespaces that an ordinary user may make. Where a machine does not allow them (some containers do
not), a task is refused, unless it has `isolation: limits`: then time, memory, processes and sizes are limited, but
the program has the user's network and files, and one that means to can outlive its time: it may kill the launcher.

Not limited: the memory of all processes together (each has its own limit), and what a program reads.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import subprocess
import sys
import tempfile
from functools import lru_cache
from pathlib import Path
from typing import NamedTuple

from zslurm.train.errors import DataError
from zslurm.train.evaluation.tasks.task import ExecutionConfig

_LAUNCHER = Path(__file__).with_name("launcher.py")
_OUTPUT_BYTES = 2000
_MIB = 2**20
_LIMITS = ("time_s", "memory_mb", "processes", "file_mb")
_START_S = 60.0
"""Seconds until a program has to have begun: a machine under load is slow to start one."""


class ProgramRun(NamedTuple):
    """How a program ended: `outcome` is passed, failed or timed out; and the end of its output."""

    outcome: str
    exit_code: int | None
    output: str

    @property
    def passed(self) -> bool:
        """Return whether it counts."""
        return self.outcome == "passed"


class Sandbox:
    """Runs programs by one command; safe to call from several threads."""

    def __init__(self, config: ExecutionConfig) -> None:
        """Take the limits of a task; use `open_sandbox`, which finds out whether they can be had here."""
        self._config = config

    def run(self, program: str) -> ProgramRun:
        """Run a program.

        Raises:
            DataError: the command cannot be started at all.
        """
        config = self._config
        # Below the folder of the user's, in which nothing is that a program must not read.
        kept = tempfile.TemporaryDirectory(prefix="zslurm-sample-", ignore_cleanup_errors=True)
        with kept as folder, tempfile.TemporaryFile() as output:
            (Path(folder) / config.file).write_text(program, encoding="utf-8", errors="replace")
            words = [word.replace("{file}", config.file) for word in config.command]
            outcome, code = self._start(words, folder, output.fileno())
            output.seek(max(0, output.seek(0, os.SEEK_END) - _OUTPUT_BYTES))
            return ProgramRun(outcome, code, output.read().decode(errors="replace"))

    def _start(self, words: list[str], folder: str, output: int) -> tuple[str, int | None]:
        config = self._config
        settings = {
            "folder": folder,
            "isolate": config.isolation == "namespaces",
            "network": config.network,
            "time_s": config.time_s,
            "memory": config.memory_mb * _MIB,
            "processes": config.processes,
            "file": config.file_mb * _MIB,
        }
        home = "/tmp/work" if config.isolation == "namespaces" else folder
        status, status_write = os.pipe()
        settings["status"] = status_write
        launcher = [sys.executable, "-I", "-S", "-B", str(_LAUNCHER), json.dumps(settings), *words]
        try:
            process = subprocess.Popen(
                launcher,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                pass_fds=(status_write,),
                cwd=folder,
                env={
                    "PATH": os.environ.get("PATH", os.defpath),
                    "HOME": home,
                    "TMPDIR": "/tmp",
                    "LANG": "C.UTF-8",
                },
                start_new_session=True,
            )
        except OSError as error:
            os.close(status)
            raise DataError(f"a generated program cannot be run: {error.strerror}") from error
        finally:
            os.close(status_write)
        try:
            with os.fdopen(status) as reader:
                begun = select.select([reader], [], [], _START_S)[0]
                said = reader.readline().strip() if begun else f"it did not start within {_START_S:.0f} s"
            if said != "ready":
                raise DataError(said or "the sandbox ended before the command began")
            try:
                code = process.wait(config.time_s)
            except subprocess.TimeoutExpired:
                return "timed out", None
            if code == 128 + signal.SIGXCPU:
                return "timed out", None
            return ("passed" if code == 0 else "failed"), code
        finally:
            if config.isolation == "limits":  # the command runs in a new session, which the launcher ends
                process.terminate()
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(_START_S)
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def open_sandbox(config: ExecutionConfig, where: str) -> Sandbox:
    """Return a sandbox with a task's limits, once it has been seen to work here.

    Raises:
        DataError: this machine does not allow what it takes; the message begins with `where`.
    """
    sandbox = Sandbox(config)
    nothing = config.model_copy(update={"command": ("true",)})
    if (problem := _problem(nothing)) is not None:
        usual = {name: ExecutionConfig.model_fields[name].default for name in _LIMITS}
        if _problem(nothing.model_copy(update=usual)) is None:
            raise DataError(f"{where}: execution: not even `true` runs within these limits: {problem}; raise them")
        if config.isolation == "namespaces":
            raise DataError(
                f"{where}: execution: a generated program cannot be isolated here: {problem}; run it where user "
                "namespaces are allowed, or set execution.isolation: limits, which leaves it the network and files"
            )
        raise DataError(f"{where}: execution: {problem}")
    found = _problem(
        config.model_copy(update={"command": ("sh", "-c", 'command -v "$1" > /dev/null', "sh", config.command[0])})
    )
    if found is not None:
        raise DataError(f"{where}: execution.command: {config.command[0]} is not there: {found}")
    return sandbox


@lru_cache(maxsize=64)
def _problem(config: ExecutionConfig) -> str | None:
    """Return why a command of these limits does not run here; None where it does."""
    try:
        run = Sandbox(config).run("")
    except DataError as error:
        return str(error)
    return None if run.passed else f"{run.outcome} {run.output.strip()[-200:]}".strip()
