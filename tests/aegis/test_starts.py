"""How an attempt begins, and what is left of one that could not."""

from __future__ import annotations

import errno
import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.launch.specs import run_spec
from zslurm.aegis import starts
from zslurm.aegis.job import Job
from zslurm.aegis.nodes import Nodes
from zslurm.aegis.starts import Running, Starts
from zslurm.launch import processes
from zslurm.launch.interpreter import Interpreter
from zslurm.launch.run_dir import RunDir
from zslurm.launch.step import StepPlan


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RunDir:
    """A run whose step sleeps."""
    directory = RunDir(tmp_path / "runs" / "tiny")
    directory.create(group_readable=False)
    monkeypatch.setattr(starts, "local_step", lambda *_: StepPlan(["sleep", "100"], dict(os.environ)))
    monkeypatch.setattr(starts, "prepare", lambda *_: Interpreter(("python",), dict(os.environ)))
    return directory


def _starts(run: RunDir, event: Callable[..., None]) -> Starts:
    spec = run_spec(run.path.parent.parent)
    made = Starts(Job(run, spec, {}, "local-1", 0, event), Nodes(spec, {}))
    assert made.why_not() is None
    return made


@pytest.fixture
def begun() -> Iterator[list[Running]]:
    running: list[Running] = []
    yield running
    for one in running:
        one.process.signal_group(signal.SIGKILL)


def test_an_attempt_is_told_of_once_its_step_runs(run: RunDir, begun: list[Running]) -> None:
    told: list[dict[str, Any]] = []
    begun.append(_starts(run, lambda kind, **fields: told.append({"event": kind} | fields)).start(("here",)))
    assert told == [{"event": "attempt_started", "attempt": 1, "nodes": "here", "world_size": 1}]


def test_of_an_attempt_that_could_not_begin_nothing_is_left(
    run: RunDir, begun: list[Running], monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    beginner = _starts(run, lambda *_, **__: None)
    with monkeypatch.context() as disk:
        disk.setattr(processes.ProcessRecord, "write", full)
        with pytest.raises(OSError, match="No space"):
            beginner.start(("here",))
    assert run.attempt_dirs() == []
    begun.append(beginner.start(("here",)))
    assert begun[0].attempt.number == 1


def test_files_of_a_step_that_runs_are_never_removed(run: RunDir) -> None:
    def full(*_: object, **__: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with pytest.raises(OSError, match="No space"):
        _starts(run, full).start(("here",))
    (attempt,) = run.attempt_dirs()
    process = processes.DetachedProcess.adopt(attempt.step_process, attempt.step_exit)
    assert process is not None
    assert process.poll() is None
    process.signal_group(signal.SIGKILL)


def test_an_attempt_that_a_file_system_hid_is_not_removed(run: RunDir, monkeypatch: pytest.MonkeyPatch) -> None:
    run.attempt(1).logs.mkdir(parents=True)
    monkeypatch.setattr(RunDir, "attempt_dirs", lambda _: [])
    with pytest.raises(FileExistsError):
        _starts(run, lambda *_, **__: None).start(("here",))
    assert run.attempt(1).logs.is_dir()
