"""Processes that an attempt left behind: real ones, marked as ranks are."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress

import psutil

from tests.waiting import wait_for
from zslurm.job.step import ATTEMPT_VARIABLE, attempt_mark
from zslurm.run.run_dir import AttemptDir

SLEEP = "import time; time.sleep(3600)"
READY = "print('ready', flush=True)"


def environ_of(attempt: AttemptDir, node: str | None = "node0") -> dict[str, str]:
    """The environment that the ranks of an attempt get on a node; None: they run without Slurm."""
    slurm = {} if node is None else {"SLURMD_NODENAME": node, "SLURM_JOB_ID": "17"}
    return {"PATH": os.environ["PATH"], ATTEMPT_VARIABLE: attempt_mark(attempt), **slurm}


class Orphans:
    """Processes that are killed at the end, with all that descends from them."""

    def __init__(self) -> None:
        self._started: list[subprocess.Popen[bytes]] = []
        self._family: set[int] = set()

    def start(self, environ: dict[str, str], program: str = f"{READY}; {SLEEP}") -> int:
        """Start a Python program and wait until it says something; returns its pid."""
        process = subprocess.Popen([sys.executable, "-c", program], env=environ, stdout=subprocess.PIPE)
        self._started.append(process)
        assert process.stdout is not None
        process.stdout.readline()
        self._family |= {child.pid for child in psutil.Process(process.pid).children(recursive=True)}
        return process.pid

    def children(self, pid: int) -> list[int]:
        return [child.pid for child in psutil.Process(pid).children(recursive=True)]

    def end(self) -> None:
        for process in self._started:
            process.kill()
            process.wait()
            assert process.stdout is not None
            process.stdout.close()
        for pid in self._family:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


@contextmanager
def orphans() -> Iterator[Orphans]:
    """Starts processes; none of them outlives the test."""
    started = Orphans()
    try:
        yield started
    finally:
        started.end()


def runs(pid: int) -> bool:
    """Whether a process is there and is no zombie."""
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def wait_gone(pid: int) -> None:
    wait_for(lambda: not runs(pid), f"process {pid} to be gone")
