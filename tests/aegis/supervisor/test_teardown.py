"""The end of an attempt: what follows from killed processes that do not die, on nodes that a test makes up."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from tests.aegis.attempts import fault
from tests.waiting import wait_for
from zslurm.aegis.core.attempt import AttemptState
from zslurm.aegis.core.detection.detector import Detector
from zslurm.aegis.protocol import Answer, Stamp
from zslurm.aegis.supervisor import teardown
from zslurm.aegis.supervisor.agents.agents import Agents
from zslurm.aegis.supervisor.attempt_starter import RunningAttempt
from zslurm.aegis.supervisor.job import Job
from zslurm.aegis.types import Fault
from zslurm.config.aegis import AegisSection
from zslurm.core.processes import DetachedProcess
from zslurm.run.events.event import Event
from zslurm.run.run_dir import RunDir

NODES = ("node0", "node1", "node2")
FOR_EVER = 10**6


@pytest.fixture(autouse=True)
def _hurry(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(teardown, "LOOK_S", 0.01)


@dataclass
class Nodes:
    """In place of Agents: on some nodes a process is left for so many looks."""

    looks: dict[str, int]
    asked: list[tuple[tuple[str, ...], bool, float]] = field(default_factory=list)
    """Each time: where, whether to kill, and the patience."""
    once_asked: Callable[[], None] = lambda: None

    def ask(
        self, _do: str, nodes: Sequence[str], *, timeout_s: float, attempt: int, kill: bool = True
    ) -> dict[str, Answer]:
        assert attempt == 1
        self.asked.append((tuple(nodes), kill, timeout_s))
        self.once_asked()
        return {node: self._answer(node) for node in nodes}

    def _answer(self, node: str) -> Answer:
        self.looks[node] = self.looks.get(node, 0) - 1
        left = [[12, "D", "python"]] if self.looks[node] >= 0 else []
        stamp = Stamp(node, 1, time.time(), time.monotonic())
        return Answer(stamp, 1, not left, "1 process is left" if left else "", {"killed": [], "left": left})


@dataclass
class Torn:
    """What came of it."""

    faults: list[Fault]
    events: list[dict[str, Any]]
    asked: list[tuple[tuple[str, ...], bool, float]]

    @property
    def kinds(self) -> list[tuple[str, str | None]]:
        return [(fault.kind, fault.node) for fault in self.faults]

    def event(self, kind: str) -> list[dict[str, Any]]:
        return [event for event in self.events if event["event"] == kind]


@pytest.fixture
def running(tmp_path: Path) -> RunningAttempt:
    """An attempt whose srun has ended."""
    run = RunDir(tmp_path / "tiny")
    run.create(group_readable=False)
    attempt = run.attempt(1)
    attempt.path.mkdir(parents=True)
    process = DetachedProcess.start(
        ["true"],
        env=os.environ,
        log=attempt.step_log,
        record_file=attempt.step_process,
        exit_file=attempt.step_exit,
    )
    wait_for(lambda: process.poll() is not None, "the step to end")
    return RunningAttempt(attempt, process, NODES)


def torn(
    running: RunningAttempt, left: dict[str, int], *, asked_after: int = FOR_EVER, dies: str = "", **aegis: Any
) -> Torn:
    """End it. `left`: looks that see processes on a node; `asked_after`: looks after which the run is to stop;
    `dies`: a node that is dead after the first."""
    nodes, events = Nodes(dict(left)), []
    spec = SimpleNamespace(aegis=AegisSection.model_validate({"teardown_s": 0.02, **aegis}))

    def record(event: Event) -> None:
        events.append(event.row)

    state = AttemptState(spec.aegis, 1, NODES, list(NODES), Detector(spec.aegis))

    def collect() -> bool:
        for node in NODES:
            state.nodes_heard.hear(node, time.monotonic())
        return len(nodes.asked) > asked_after

    def die() -> None:
        if dies and not state.faults:
            state.faults.append(fault("node_dead", dies))

    nodes.once_asked = die
    job = cast(Job, SimpleNamespace(spec=spec, slurm_id=None, record=record))
    faults = teardown.clear(job, running, state, cast(Agents, nodes), collect)
    assert [event["event"] for event in events].index("attempt_cleared") == len(events) - 1
    return Torn(faults, events, nodes.asked)


def test_where_all_is_gone_there_is_nothing_to_wait_for(running: RunningAttempt) -> None:
    done = torn(running, {})
    assert (done.faults, [where for where, _, _ in done.asked]) == ([], [NODES])
    assert [event["event"] for event in done.events] == ["attempt_cleared"]


def test_who_looks_for_long_is_waited_for(running: RunningAttempt) -> None:
    """Its answer comes when its own patience is over."""
    ((_, _, patience),) = torn(running, {}, teardown_s=60).asked
    assert patience > 60


def test_a_file_system_that_stalls_several_nodes_is_outlasted_and_none_is_blamed(running: RunningAttempt) -> None:
    done = torn(running, {"node0": 30, "node2": 4})
    assert done.kinds == [("storage_fault", None)]
    assert (done.faults[0].role, done.faults[0].scope) == ("root", "storage")
    assert "node[0,2]" in done.faults[0].line
    (postponed,), (cleared,) = done.event("start_postponed"), done.event("attempt_cleared")
    assert postponed["reason"] == "killed processes cannot die yet on node[0,2]"
    assert cleared["left"] == {}
    killed = [where for where, kill, _ in done.asked if kill]
    assert killed == [NODES, ("node2",), ("node0",)], "the memory of each is released too, once they are gone"


def test_processes_of_one_node_get_time_as_well(running: RunningAttempt) -> None:
    done = torn(running, {"node1": 5})
    assert done.faults == []
    assert done.event("attempt_cleared")[0]["left"] == {}


def test_a_node_on_which_they_stay_is_broken(running: RunningAttempt) -> None:
    done = torn(running, {"node1": FOR_EVER})
    assert done.kinds == [("orphans", "node1")]
    assert done.event("attempt_cleared")[0]["left"] == {"node1": "1 process is left"}


def test_where_they_stay_on_several_nodes_none_is_named(running: RunningAttempt) -> None:
    done = torn(running, {"node0": FOR_EVER, "node1": FOR_EVER})
    assert done.kinds == [("storage_fault", None), ("orphans_many", None)]


def test_the_last_of_several_nodes_is_broken_if_they_stay_there(running: RunningAttempt) -> None:
    done = torn(running, {"node0": 3, "node1": FOR_EVER})
    assert done.kinds == [("storage_fault", None), ("orphans", "node1")]


def test_nobody_waits_for_a_node_that_died(running: RunningAttempt) -> None:
    done = torn(running, {"node1": FOR_EVER}, dies="node1")
    assert (done.faults, len(done.asked)) == ([], 1)


@pytest.mark.parametrize("looks", [0, 3])
def test_nobody_waits_where_the_run_is_asked_to_stop(running: RunningAttempt, looks: int) -> None:
    done = torn(running, {"node0": FOR_EVER, "node1": FOR_EVER}, asked_after=looks, teardown_s=FOR_EVER)
    assert done.faults == []
    assert set(done.event("attempt_cleared")[0]["left"]) == {"node0", "node1"}


def test_nobody_waits_where_nothing_will_be_started(running: RunningAttempt) -> None:
    done = torn(running, {"node1": FOR_EVER}, mode="observe")
    assert (done.kinds, len(done.asked)) == ([("orphans", "node1")], 1)
