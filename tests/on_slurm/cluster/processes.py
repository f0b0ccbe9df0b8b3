"""Which processes belong to a test cluster, and how they are killed.

Never by program name alone: another Slurm may run on this machine. Everything that a cluster starts (daemons,
commands of tests, and through them jobs) carries MARK in its environment; job processes also carry Slurm's name
of the cluster. slurmstepd overwrites its environment, but keeps its node's log file open, and that names both.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Iterator

import psutil

from tests.on_slurm.cluster.layout import Instance

MARK = "ZSLURM_TEST_CLUSTER"
"""Environment variable: the instance id of whatever a cluster started."""

DAEMON_MARK = "ZSLURM_TEST_DAEMON"
"""Environment variable: the name of a daemon of ours, such as slurmctld or slurmd.node3."""


def members(instance: Instance) -> list[psutil.Process]:
    """Every live process of the cluster."""
    return list(_select(lambda process: _belongs(process, instance)))


def daemons(instance: Instance, name: str) -> list[psutil.Process]:
    """The processes of one daemon; several if it forks helpers, none if it is down."""
    return list(
        _select(
            lambda process: (
                (environment := process.environ()).get(DAEMON_MARK) == name
                and environment.get(MARK) == instance.id
            )
        )
    )


def step_daemons(instance: Instance, node: str) -> list[psutil.Process]:
    """The slurmstepd processes of one node."""
    log = str(instance.log / f"slurmd.{node}.log")
    return list(_select(lambda process: process.name() == "slurmstepd" and log in _open_paths(process)))


def tasks(instance: Instance, node: str) -> list[psutil.Process]:
    """Batch scripts and tasks that run on one node, with all their descendants that kept the environment."""
    return list(
        _select(lambda process: _belongs(process, instance) and process.environ().get("SLURMD_NODENAME") == node)
    )


def kill_all(find: Callable[[], list[psutil.Process]], *, deadline_s: float = 30.0) -> None:
    """Send SIGKILL until `find` finds nothing more: a process may fork between the look and the signal.

    Raises:
        TimeoutError: something survives (a process in uninterruptible sleep).
    """
    end = time.monotonic() + deadline_s
    while left := find():
        if time.monotonic() > end:
            raise TimeoutError(f"still alive after SIGKILL: {left}")
        for process in left:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        psutil.wait_procs(left, timeout=0.2)


def freeze(processes: list[psutil.Process]) -> None:
    """Stop processes where they are, so that none of them can act on the end of another."""
    for process in processes:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.suspend()


def of_user(uid: int) -> list[psutil.Process]:
    """Every live process of one user id."""
    return list(_select(lambda process: process.uids().real == uid))


def _select(wanted: Callable[[psutil.Process], bool]) -> Iterator[psutil.Process]:
    for process in psutil.process_iter():
        if process.pid == os.getpid():
            continue
        # Processes end while they are looked at; kernel threads and zombies have no environment.
        with contextlib.suppress(psutil.Error, OSError):
            if process.status() != psutil.STATUS_ZOMBIE and wanted(process):
                yield process


def _belongs(process: psutil.Process, instance: Instance) -> bool:
    environment = process.environ()
    if environment.get(MARK) == instance.id:
        return True
    if "SLURM_JOB_ID" in environment:
        return environment.get("SLURM_CLUSTER_NAME") == instance.cluster_name or environment.get(
            "SLURM_CONF"
        ) == str(instance.slurm_conf)
    # A person's shell may have exported SLURM_CONF, so that alone does not make it ours.
    if not process.name().startswith("slurm"):
        return False
    return any(path.startswith(f"{instance.log}/") for path in _open_paths(process))


def _open_paths(process: psutil.Process) -> list[str]:
    return [file.path for file in process.open_files()]
