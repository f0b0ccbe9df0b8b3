"""How an attempt begins, and what is left of one that could not."""

from __future__ import annotations

import errno
import os
import signal
from collections.abc import Callable, Iterator
from itertools import groupby
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.submit.specs import run_spec
from zslurm.aegis.supervisor import attempt_starter, supervisor
from zslurm.aegis.supervisor.attempt_starter import AttemptStarter, RunningAttempt
from zslurm.aegis.supervisor.job import Job
from zslurm.aegis.supervisor.node_pool import Nodes
from zslurm.core import processes
from zslurm.core.errors import ZslurmError
from zslurm.job.preparation.interpreter import Interpreter
from zslurm.job.step import StepPlan
from zslurm.run.events import StartPostponed
from zslurm.run.events.event import Event
from zslurm.run.run_dir import RunDir


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RunDir:
    """A run whose step sleeps."""
    directory = RunDir(tmp_path / "runs" / "tiny")
    directory.create(group_readable=False)
    monkeypatch.setattr(attempt_starter, "local_step", lambda *_: StepPlan(["sleep", "100"], dict(os.environ)))
    monkeypatch.setattr(attempt_starter, "prepare", lambda *_: Interpreter(("python",), dict(os.environ)))
    return directory


def _starter(run: RunDir, record: Callable[[Event], None], **settings: Any) -> AttemptStarter:
    spec = run_spec(run.path.parent.parent, **settings)
    made = AttemptStarter(Job(run, spec, {}, "local-1", 0, record), Nodes(spec, {}))
    assert made.blocking_reason() is None
    return made


@pytest.fixture
def begun() -> Iterator[list[RunningAttempt]]:
    running: list[RunningAttempt] = []
    yield running
    for one in running:
        one.process.signal_group(signal.SIGKILL)


def test_an_attempt_is_recorded_once_its_step_runs(run: RunDir, begun: list[RunningAttempt]) -> None:
    recorded: list[dict[str, Any]] = []
    begun.append(_starter(run, lambda event: recorded.append(event.row)).start(("here",)))
    assert recorded == [{"event": "attempt_started", "attempt": 1, "nodes": "here", "world_size": 1}]


@pytest.mark.parametrize(
    ("mode", "ranks", "reason"),
    [
        ("observe", 2, "aegis.mode is observe, and lost ranks are replaced only where it is act"),
        ("off", 2, "aegis.mode is off, and lost ranks are replaced only where it is act"),
        ("act", 1, "a single rank has no other one that could continue"),
    ],
)
def test_why_nothing_is_recovered_in_memory_though_that_is_set_is_recorded(
    run: RunDir, begun: list[RunningAttempt], mode: str, ranks: int, reason: str
) -> None:
    recorded: list[dict[str, Any]] = []
    starter = _starter(
        run,
        lambda event: recorded.append(event.row),
        aegis={"recovery": "memory", "mode": mode},
        slurm={"ranks_per_node": ranks},
    )
    begun.append(starter.start(("here",)))
    assert recorded[0] == {"event": "recovery_unavailable", "attempt": 1, "reason": reason}
    assert begun[0].memory is None


def test_of_an_attempt_that_could_not_begin_nothing_is_left(
    run: RunDir, begun: list[RunningAttempt], monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    beginner = _starter(run, lambda event: None)
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
        _starter(run, full).start(("here",))
    (attempt,) = run.attempt_dirs()
    process = processes.DetachedProcess.adopt(attempt.step_process, attempt.step_exit)
    assert process is not None
    assert process.poll() is None
    process.signal_group(signal.SIGKILL)


def test_an_attempt_that_a_file_system_hid_is_not_removed(run: RunDir, monkeypatch: pytest.MonkeyPatch) -> None:
    run.attempt(1).logs.mkdir(parents=True)
    monkeypatch.setattr(RunDir, "attempt_dirs", lambda _: [])
    with pytest.raises(FileExistsError):
        _starter(run, lambda event: None).start(("here",))
    assert run.attempt(1).logs.is_dir()


# --- the supervisor's tries -----------------------------------------------------------------------------------

SLURM_AWAY, STALE, BEGUN = "the controller does not answer", "Stale file handle", "begun"


class Tries:
    """A supervisor's `start_attempt` with a clock that its pauses move; what each try meets is given."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, run: RunDir, meets: list[str]) -> None:
        self.meets, self.now, self.told = meets, 1000.0, list[str]()
        monkeypatch.setattr(supervisor.time, "monotonic", lambda: self.now)
        self.supervisor: Any = object.__new__(supervisor.Supervisor)
        self.supervisor.nodes = SimpleNamespace(slurm_is_away=self.slurm_is_away)
        self.supervisor.starter = SimpleNamespace(start=self.start)
        self.supervisor.settings = SimpleNamespace(hang=SimpleNamespace(setup_s=100))
        stop = SimpleNamespace(asked=False)
        there = SimpleNamespace(lost=lambda: None)
        self.supervisor.job = SimpleNamespace(
            stop=stop, run=run, record=self.record, presence=there, pause=self.pause
        )

    def slurm_is_away(self) -> str | None:
        return self.meets.pop(0) if self.meets[0] == SLURM_AWAY else None

    def start(self, nodes: tuple[str, ...]) -> str:
        if (met := self.meets.pop(0)) == BEGUN:
            return met
        raise OSError(errno.ESTALE, met)

    def pause(self, seconds: float) -> None:
        self.now += seconds

    def record(self, event: Event) -> None:
        assert isinstance(event, StartPostponed)
        assert event.needs_person is (event.reason != SLURM_AWAY), "Slurm comes back by itself"
        self.told.append((event.reason or "").rpartition(": ")[2])

    def begin(self) -> Any:
        return self.supervisor.start_attempt(("node1",))


@pytest.mark.parametrize(
    "meets",
    [
        [SLURM_AWAY] * 30 + [STALE, BEGUN],  # 30 are longer than a setup may take
        [STALE] + [SLURM_AWAY] * 30 + [STALE, BEGUN],
        [STALE] * 20 + [BEGUN],
    ],
)
def test_a_file_system_may_fail_for_a_while_however_long_slurm_was_away(
    meets: list[str], run: RunDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    tries = Tries(monkeypatch, run, meets)
    assert tries.begin() == BEGUN
    assert tries.told == [reason for reason, _ in groupby(tries.told)], "each change once"
    assert STALE in tries.told


def test_a_file_system_that_keeps_failing_ends_the_run(run: RunDir, monkeypatch: pytest.MonkeyPatch) -> None:
    tries = Tries(monkeypatch, run, [SLURM_AWAY] * 30 + [STALE] * 100)
    with pytest.raises(ZslurmError, match=f"{STALE}: no attempt could be started"):
        tries.begin()
    assert len(tries.meets) == 100 - 22, "one try each 5 s, for 100 s and one more"
