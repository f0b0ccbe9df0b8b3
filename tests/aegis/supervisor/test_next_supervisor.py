"""What a supervisor knows of its nodes when it comes after another one, and which of them it makes ready."""

from __future__ import annotations

import json
import os
import signal
import socket
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar, cast

import pytest

from tests.submit.scripted_slurm import RUNNING, ScriptedSlurm
from tests.submit.specs import run_spec
from zslurm.aegis.core.detection.detector import Detector
from zslurm.aegis.core.following import Requeue
from zslurm.aegis.core.policy.outcome import AttemptOutcome
from zslurm.aegis.core.policy.policy import SLURM_REQUEUES
from zslurm.aegis.core.starting import PendingDecision
from zslurm.aegis.supervisor import attempt_starter as module
from zslurm.aegis.supervisor import recovery as recovery_module
from zslurm.aegis.supervisor import supervisor as supervisor_module
from zslurm.aegis.supervisor.agents.liveness import Liveness
from zslurm.aegis.supervisor.attempt_starter import AttemptStarter, RunningAttempt
from zslurm.aegis.supervisor.fault_collector import FaultCollector
from zslurm.aegis.supervisor.job import Job
from zslurm.aegis.supervisor.node_pool import Nodes
from zslurm.aegis.supervisor.recovery import Recovery
from zslurm.aegis.supervisor.supervisor import Supervisor
from zslurm.aegis.types import Decision
from zslurm.core.errors import Exit, SlurmRefused
from zslurm.core.processes import ProcessRecord
from zslurm.job.preparation.interpreter import Interpreter
from zslurm.run.run_dir import RunDir

JOB = {"SLURM_JOB_ID": "7", "SLURM_RESTART_COUNT": "1", "SLURM_JOB_NODELIST": "node[0-3]", "PATH": "/nonexistent"}


class Successor:
    """The supervisor that comes after another one, in job 7 on four nodes, of which the ranks need two."""

    def __init__(self, directory: Path, aegis: dict[str, Any] | None = None, **cluster: Any) -> None:
        self.run = RunDir(directory / "runs" / "tiny")
        self.run.create(group_readable=False)
        self.told: list[dict[str, Any]] = []
        spec = run_spec(
            directory,
            slurm={"nodes": 2, "spares": 2},
            cluster={"name": "lab", "launcher": "slurm", **cluster},
            aegis=aegis or {},
        )
        self.job = Job(self.run, spec, JOB, "7", 1, lambda event: self.told.append(event.row))
        self.nodes = Nodes(spec, JOB)
        self.starter = AttemptStarter(self.job, self.nodes)

    def had_attempt(self, number: int, *, restart: int = 1, dead: str | None = None) -> None:
        """An attempt that failed, and was followed by another."""
        attempt = self.run.attempt(number)
        attempt.path.mkdir()
        attempt.description.write_text(json.dumps({"attempt": number, "job_id": "7", "restart": restart}))
        if dead is not None:
            fault = {
                "kind": "node_dead",
                "role": "root",
                "scope": "node",
                "source": "agent",
                "line": "",
                "node": dead,
            }
            self.write("fault_detected", attempt=number, fault_time=1.0, **fault)
        self.write("attempt_ended", attempt=number, outcome="failed", exit_code=1)
        self.write("decision", attempt=number, action="swap", reason="so", nodes=["node1", "node2"])

    def left_running(self, number: int) -> None:
        """An attempt whose ranks run, and whose store server is gone."""
        attempt = self.run.attempt(number)
        attempt.path.mkdir()
        described = {"attempt": number, "job_id": "7", "restart": 1, "nodes": "node[0-1]"}
        attempt.description.write_text(json.dumps(described))
        self.write("attempt_started", attempt=number, nodes="node[0-1]", world_size=2)
        ProcessRecord.of(os.getpid()).write(attempt.step_process)
        with socket.create_server(("127.0.0.1", 0)) as closed:
            address = {"port": closed.getsockname()[1], "token": "token"}
        attempt.store_control.write_text(json.dumps(address))

    def write(self, event: str, /, **fields: Any) -> None:
        with self.run.events.open("a") as events:
            events.write(json.dumps({"time": time.time(), "event": event, "job_id": "7", **fields}) + "\n")


def test_ranks_whose_store_server_does_not_answer_are_to_be_ended(tmp_path: Path) -> None:
    """They can neither save nor be asked to stop."""
    successor = Successor(tmp_path, {"recovery": "memory"})
    successor.left_running(1)
    found = successor.starter.left_over()
    assert isinstance(found, RunningAttempt)
    assert (found.memory, found.nodes, found.adopted) == (None, ("node0", "node1"), True)
    assert "its store server does not answer: Connection refused" in found.broken
    (event,) = successor.told
    assert (event["event"], event["reason"] in found.broken) == ("recovery_unavailable", True)


def test_ranks_that_had_no_recovery_in_memory_train_on_without(tmp_path: Path) -> None:
    """Rank 0 hosts their store."""
    successor = Successor(tmp_path, {"recovery": "memory"})
    successor.left_running(1)
    successor.write("recovery_unavailable", attempt=1, reason="a single rank has no other one")
    found = successor.starter.left_over()
    assert isinstance(found, RunningAttempt)
    assert (found.broken, successor.told) == ("", [])


@pytest.fixture
def prepared(monkeypatch: pytest.MonkeyPatch) -> list[Sequence[str]]:
    """The nodes that were made ready, each time that it was done."""
    done: list[Sequence[str]] = []

    def prepare(spec: Any, run: Any, job_id: str, nodes: Sequence[str], environ: Any, event: Any) -> Interpreter:
        done.append(nodes)
        return Interpreter.own(environ)

    monkeypatch.setattr(module, "prepare", prepare)
    return done


def test_nodes_that_died_in_any_attempt_of_this_start_of_the_job_stay_dead(tmp_path: Path) -> None:
    successor = Successor(tmp_path)
    successor.had_attempt(1, restart=0, dead="node3")
    successor.had_attempt(2, dead="node0")
    successor.had_attempt(3)
    assert isinstance(successor.starter.left_over(), PendingDecision)
    assert successor.nodes.dead == {"node0"}, "a requeued job gets nodes that live"
    assert successor.nodes.usable(()) == ("node1", "node2", "node3")


def test_only_nodes_that_ranks_may_use_are_made_ready(
    tmp_path: Path, prepared: list[Sequence[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[Sequence[str]] = []
    monkeypatch.setattr(module, "check_rails", lambda job, nodes: asked.append(nodes))
    successor = Successor(tmp_path, nics=["ionic_0"], gpus_per_node=1)
    successor.had_attempt(1, dead="node0")
    successor.write("nodes_excluded", nodes="node3", reason="its NIC is down")
    successor.starter.left_over()
    assert successor.starter.blocking_reason() is None
    assert prepared == asked == [("node1", "node2")]
    assert successor.starter.first_nodes() == ("node1", "node2")
    assert successor.told == []


def test_rails_of_a_profile_without_nics_are_not_read(
    tmp_path: Path, prepared: list[Sequence[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[Sequence[str]] = []
    monkeypatch.setattr(module, "check_rails", lambda job, nodes: asked.append(nodes))
    successor = Successor(tmp_path, nics=[], gpus_per_node=1)
    assert successor.starter.blocking_reason() is None
    assert asked == []
    assert len(prepared) == 1, "the nodes are made ready all the same"


def test_excluded_nodes_are_made_ready_where_there_are_no_others(
    tmp_path: Path, prepared: list[Sequence[str]]
) -> None:
    successor = Successor(tmp_path)
    successor.write("nodes_excluded", nodes="node[1-3]", reason="uncorrectable memory errors")
    assert successor.starter.blocking_reason() is None
    assert prepared == [("node0", "node1", "node2", "node3")]
    assert successor.starter.first_nodes() == ("node0", "node1")
    assert successor.told == [{"event": "excluded_nodes_used", "nodes": "node[1-3]"}]


def test_a_node_that_slurm_took_from_the_job_is_not_made_ready(
    tmp_path: Path, prepared: list[Sequence[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A spare may have died unnoticed."""
    slurm = ScriptedSlurm(tmp_path / "bin", monkeypatch)
    slurm.gives(RUNNING)  # it has node[0-1]
    monkeypatch.setitem(JOB, "PATH", str(slurm.directory))
    monkeypatch.setitem(JOB, "SLURM_JOB_ID", RUNNING)
    assert Successor(tmp_path).starter.blocking_reason() is None
    assert prepared == [("node0", "node1")]


class FakeAgents:
    """Agents that only record on which nodes they were to start."""

    started_on: Sequence[str] = ()

    def __init__(self, *_about: Any, pauses: Any) -> None: ...

    def start(self, spec: Any, run: Any, job_id: str, nodes: Sequence[str], environ: Any) -> None:
        FakeAgents.started_on = nodes

    def stop(self) -> None: ...


def test_no_agent_is_started_on_a_node_that_died_under_an_earlier_supervisor(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nor is its agent missed: Slurm would refuse the step of all of them."""
    monkeypatch.setattr(signal, "signal", lambda *_: None)
    monkeypatch.setattr(supervisor_module, "Agents", FakeAgents)
    ended = AttemptOutcome("interrupted", 75)
    monkeypatch.setattr(Supervisor, "run_attempts", lambda self, found: ended)
    successor = Successor(tmp_path)
    successor.had_attempt(1, dead="node0")
    successor.had_attempt(2)
    successor.write("nodes_excluded", nodes="node3", reason="its NIC is down")
    successor.run.config.write_text(successor.job.spec.model_dump_json())
    assert Supervisor(successor.run, JOB).supervise() == 75
    assert FakeAgents.started_on == ("node1", "node2", "node3")


class FakeMonitor:
    """In place of AttemptMonitor: the attempt completes at once."""

    spares: ClassVar[list[int]] = []
    """Of each attempt so far."""

    def __init__(self, collected: FaultCollector) -> None:
        self.spares.append(collected.state.spares)

    def until_end(self) -> AttemptOutcome:
        return AttemptOutcome("completed", 0)


@pytest.fixture
def successor(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Successor:
    """One whose attempts complete at once."""
    monkeypatch.setattr(supervisor_module, "AttemptMonitor", FakeMonitor)
    monkeypatch.setattr(FakeMonitor, "spares", [])
    made = Successor(tmp_path)
    made.run.config.write_text(made.job.spec.model_dump_json())
    return made


def _supervise(successor: Successor, detector: Any, agents: Any = None, **attempt: Any) -> None:
    """Have a supervisor see one attempt to its end."""
    supervisor = Supervisor(successor.run, JOB)
    supervisor.job, supervisor.nodes, supervisor.agents = successor.job, successor.nodes, agents
    supervisor.detector, supervisor.helpers = detector, cast(Any, None)
    process: Any = None
    supervisor.watch_attempt(RunningAttempt(successor.run.attempt(2), process, ("node0", "node1"), **attempt))


def test_an_excluded_node_is_no_spare(successor: Successor) -> None:
    """Or a slow node would be given up for the sake of one that will not be used."""
    for reason in ("nobody is excluded", "node3 is"):
        _supervise(successor, Detector(successor.job.spec.aegis))
        successor.write("nodes_excluded", nodes="node3", reason=reason)
    assert FakeMonitor.spares == [2, 1]


@pytest.mark.parametrize(
    ("adopted", "newest", "known"),
    [(True, 2, (1.5, 1.25)), (True, 1, ()), (False, 2, ())],
    ids=["adopted", "adopted before its first step", "started"],
)
def test_a_supervisor_that_adopts_an_attempt_knows_how_long_its_steps_take(
    successor: Successor, adopted: bool, newest: int, known: tuple[float, ...]
) -> None:
    """By its metrics, or a rank that stopped before would have as long as a setup may take."""
    rows = [{"kind": "step", "attempt": newest, "step": step, "step_time_s": 1.0 + step / 4} for step in (1, 2)]
    successor.run.metrics.write_text("".join(json.dumps(row) + "\n" for row in rows))
    begun: list[tuple[float, ...]] = []
    detector = SimpleNamespace(begin=lambda *_, step_times, **__: begun.append(tuple(step_times)))
    _supervise(successor, detector, SimpleNamespace(attempt=0, liveness=Liveness(1.0)), adopted=adopted)
    assert begun == [known]


@pytest.mark.parametrize(
    ("rows", "cause"),
    [
        (
            [],
            "the job was requeued by Slurm or an administrator (scontrol requeue, a preemption, or its batch node "
            "died) while the run recovered from: Killed",
        ),
        (
            [("deputy_acted", {"node": "node1", "reason": "no word"})],
            "the supervisor was lost, and the agent on node1 requeued the job "
            "while the run recovered from: Killed",
        ),
    ],
    ids=["a requeue", "the standby"],
)
def test_an_attempt_that_was_cut_short_names_what_interrupted_the_recovery(
    tmp_path: Path, rows: list[tuple[str, dict[str, Any]]], cause: str
) -> None:
    successor = Successor(tmp_path)
    successor.write("attempt_ended", attempt=1, outcome="failed", exit_code=137, cause={"message": "Killed"})
    attempt = successor.run.attempt(2)
    attempt.path.mkdir()
    attempt.description.write_text(json.dumps({"attempt": 2, "job_id": "7", "restart": 0}))
    successor.write("attempt_started", attempt=2)
    for event, fields in rows:
        successor.write(event, **fields)
    assert successor.starter.left_over() is None
    (told,) = [row for row in successor.told if row["event"] == "attempt_ended"]
    assert (told["attempt"], told["outcome"], told["cause"]) == (2, "lost", {"message": cause})


def test_an_attempt_that_trained_and_was_requeued_by_a_user_says_so(tmp_path: Path) -> None:
    successor = Successor(tmp_path)
    attempt = successor.run.attempt(1)
    attempt.path.mkdir()
    attempt.description.write_text(json.dumps({"attempt": 1, "job_id": "7", "restart": 0}))
    successor.write("attempt_started", attempt=1)
    successor.run.metrics.write_text(json.dumps({"kind": "step", "attempt": 1, "step": 4, "time": 9.0}) + "\n")
    action = {"action": "requeue", "job_id": "7", "user": "ada", "time": time.time() + 60}
    successor.run.submissions.write_text(json.dumps(action) + "\n")
    successor.starter.left_over()
    cause = "the job was requeued by ada (zslurm requeue) before the end of the attempt was recorded"
    assert successor.told[-1]["cause"] == {"message": cause}


# --- a job that Slurm started on excluded nodes ----------------------------------------------------------------


class _Recovery(Recovery):
    """Requeues are written down, and not made; the partition has `others` nodes that the run may use."""

    def __init__(self, successor: Successor, others: int | None) -> None:
        super().__init__(successor.job, cast(Nodes, _NodesOfSlurm(others)), None, cast(Any, None))
        self.requeued: list[tuple[str, ...]] = []

    def _put_back(self, action: Requeue) -> None:
        self.requeued.append(action.decision.exclude)


class _NodesOfSlurm:
    every, can_requeue = ("node0", "node1", "node2", "node3"), True

    def __init__(self, others: int | None) -> None:
        self._others = others

    def elsewhere(self, excluded: object) -> int | None:
        return self._others


@pytest.mark.parametrize(("others", "leaves"), [(4, True), (3, False), (None, False)])
def test_a_job_that_got_excluded_nodes_is_requeued_where_it_can_start_without_them(
    tmp_path: Path, others: int | None, leaves: bool
) -> None:
    successor = Successor(tmp_path)
    successor.write("nodes_excluded", nodes="node3", reason="it died")
    recovery = _Recovery(successor, others)
    assert recovery.leave_excluded(("node0", "node1")) is None, "spares take its place"
    outcome = recovery.leave_excluded(("node0", "node3"))
    assert recovery.requeued == ([("node3",)] if leaves else [])
    assert (outcome is not None and outcome.exit_code == Exit.INTERRUPTED) is leaves


def test_excluded_nodes_are_used_after_some_requeues_in_vain(tmp_path: Path) -> None:
    successor = Successor(tmp_path)
    successor.write("nodes_excluded", nodes="node3", reason="it died")
    for _ in range(3):
        successor.write("attempt_started", attempt=1, nodes="node0", world_size=1)
        successor.write("requeued", excluded="", reason="so")
    recovery = _Recovery(successor, 8)
    assert recovery.leave_excluded(("node3",)) is not None
    for _ in range(2):
        successor.write("requeued", excluded="", reason="so")
    assert recovery.leave_excluded(("node3",)) is None, "three in a row, and Slurm gives it again"


@pytest.mark.parametrize(
    "narrowed", [{"constraint": "mi300x"}, {"nodelist": "node[0-2]"}, {"flags": {"reservation": "spring"}}]
)
def test_a_job_that_may_use_only_some_nodes_is_not_requeued_for_others(
    tmp_path: Path, narrowed: dict[str, Any]
) -> None:
    successor = Successor(tmp_path)
    slurm = successor.job.spec.slurm.model_copy(update=narrowed)
    spec = successor.job.spec.model_copy(update={"slurm": slurm})
    successor.job = replace(successor.job, spec=spec)
    successor.write("nodes_excluded", nodes="node3", reason="it died")
    recovery = _Recovery(successor, 8)
    assert recovery.leave_excluded(("node0", "node3")) is None
    assert recovery.requeued == []


def test_a_requeue_is_recorded_though_slurm_kills_the_job_while_its_list_is_changed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    successor = Successor(tmp_path)
    successor.write("nodes_excluded", nodes="node3", reason="it died", expires=time.time() + 600)

    def killed(*_: object, on_requeued: Any, **__: object) -> None:
        on_requeued()
        raise KeyboardInterrupt

    monkeypatch.setattr(recovery_module, "requeue_job", killed)
    nodes = SimpleNamespace(every=("node0", "node3"), can_requeue=True, dead=set(), elsewhere=lambda _: 8)
    recorder = SimpleNamespace(flush=lambda: None)
    with pytest.raises(KeyboardInterrupt):
        Recovery(successor.job, cast(Any, nodes), None, cast(Any, recorder)).leave_excluded(("node3",))
    assert [event["event"] for event in successor.told] == ["requeued"]


def test_a_run_whose_job_cannot_be_requeued_may_ask_for_helper_jobs_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It starts where it is."""
    successor = Successor(tmp_path)
    successor.write("nodes_excluded", nodes="node3", reason="it died", expires=time.time() + 600)

    def refused(*_: object, **__: object) -> None:
        raise SlurmRefused("Requested operation is disabled")

    monkeypatch.setattr(recovery_module, "requeue_job", refused)
    nodes = SimpleNamespace(every=("node0", "node3"), can_requeue=True, dead=set(), elsewhere=lambda _: 8)
    calls: list[str] = []
    helpers = SimpleNamespace(close=lambda: calls.append("close"), reopen=lambda: calls.append("reopen"))
    recorder = SimpleNamespace(flush=lambda: None)
    recovery = Recovery(successor.job, cast(Any, nodes), None, cast(Any, recorder), cast(Any, helpers))
    assert recovery.leave_excluded(("node3",)) is None
    assert calls == ["close", "reopen"]


@pytest.mark.parametrize("mode", ["act", "observe"])
def test_a_job_that_slurm_requeues_by_itself_did_not_fail(tmp_path: Path, mode: str) -> None:
    recovery = _Recovery(Successor(tmp_path, {"mode": mode}), 8)
    outcome, nodes = recovery.carry_out(
        PendingDecision(Decision("finish", SLURM_REQUEUES), AttemptOutcome("failed", 137), 1)
    )
    assert outcome is not None
    assert (outcome.outcome, outcome.exit_code, nodes) == ("interrupted", Exit.INTERRUPTED, ())
    stopped, _ = recovery.carry_out(
        PendingDecision(Decision("finish", "the run is complete"), AttemptOutcome("completed", 0), 1)
    )
    assert stopped == AttemptOutcome("completed", 0)
