"""Whether a rank's process has ended, with real processes."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.aegis.orphans import READY, SLEEP, Orphans, environ_of, orphans, wait_gone
from zslurm.aegis.agent.rank_processes import RankProcesses
from zslurm.aegis.agent.sensors.progress import ranks_in
from zslurm.run.run_dir import RunDir
from zslurm.train.progress import Phase, ProgressWriter

ON_NODE = {"SLURMD_NODENAME": "node0"}


@pytest.fixture
def started() -> Iterator[Orphans]:
    with orphans() as processes:
        yield processes


@pytest.fixture
def processes(tmp_path: Path) -> RankProcesses:
    return RankProcesses(RunDir(tmp_path / "run").attempt(3), ON_NODE)


def _record(directory: Path, pid: int) -> None:
    writer = ProgressWriter(0, 3, str(directory), pid)
    writer.update(phase=Phase.STEP, step=7)
    writer.close()


def test_a_killed_rank_is_reported_as_gone(tmp_path: Path, started: Orphans, processes: RankProcesses) -> None:
    pid = started.start(environ_of(processes.attempt))
    _record(tmp_path, pid)
    assert not ranks_in(tmp_path, is_gone=processes.is_gone)[0].gone
    os.kill(pid, signal.SIGKILL)
    wait_gone(pid)
    (rank,) = ranks_in(tmp_path, is_gone=processes.is_gone)
    assert (rank.gone, rank.halted, rank.step) == (True, False, 7)


def test_a_rank_that_is_stopped_is_not_gone(started: Orphans, processes: RankProcesses) -> None:
    pid = started.start(environ_of(processes.attempt))
    assert not processes.is_gone(pid)
    os.kill(pid, signal.SIGSTOP)
    assert not processes.is_gone(pid)


def test_nothing_is_said_of_a_process_that_was_never_seen_alive(
    started: Orphans, processes: RankProcesses
) -> None:
    """As the pid of a rank in another pid namespace, or one that ended before this agent began."""
    pid = started.start(environ_of(processes.attempt))
    os.kill(pid, signal.SIGKILL)
    wait_gone(pid)
    assert [processes.is_gone(pid) for _ in range(2)] == [False, False]


def test_nothing_is_said_of_a_process_of_somebody_else(tmp_path: Path, started: Orphans) -> None:
    run = RunDir(tmp_path / "run")
    processes = RankProcesses(run.attempt(3), ON_NODE)
    pid = started.start(environ_of(run.attempt(9)))
    assert not processes.is_gone(pid)
    os.kill(pid, signal.SIGKILL)
    wait_gone(pid)
    assert not processes.is_gone(pid)


def test_a_program_is_not_gone_while_the_process_that_runs_it_for_the_rank_is_alive(
    started: Orphans, processes: RankProcesses
) -> None:
    """That process may still be about to record how the program ended."""
    program = f"import subprocess, sys; subprocess.Popen([sys.executable, '-c', {SLEEP!r}]); {READY}; {SLEEP}"
    above = started.start(environ_of(processes.attempt), program)
    (pid,) = started.children(above)
    assert not processes.is_gone(pid)
    os.kill(pid, signal.SIGKILL)
    wait_gone(pid)
    assert not processes.is_gone(pid)
    os.kill(above, signal.SIGKILL)
    wait_gone(above)
    assert processes.is_gone(pid)
