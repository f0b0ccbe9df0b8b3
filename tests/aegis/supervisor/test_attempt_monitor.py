"""The monitor of one attempt, with a step and agents that a test makes up."""

from __future__ import annotations

import errno
import json
import os
import signal
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from tests.submit.specs import run_spec
from tests.waiting import wait_for
from zslurm.aegis.core.attempt import GONE, MemoryState
from zslurm.aegis.core.detection.detector import Detector
from zslurm.aegis.core.detection.early_exits import LINE
from zslurm.aegis.core.messages import AskAbout, CoreEvent, Recovered, ReportReceived
from zslurm.aegis.core.policy.attribution import attribute
from zslurm.aegis.core.policy.shrinking import FewerNodes
from zslurm.aegis.core.root_cause import roots_of
from zslurm.aegis.protocol import AgentReport, Answer, ProgressReport, RankProgress, Stamp
from zslurm.aegis.supervisor import stop_forwarder
from zslurm.aegis.supervisor.agents.agents import Agents
from zslurm.aegis.supervisor.attempt_monitor import AttemptMonitor
from zslurm.aegis.supervisor.attempt_starter import RunningAttempt
from zslurm.aegis.supervisor.fault_collector import FaultCollector
from zslurm.aegis.supervisor.in_memory.memory_shell import MemoryShell
from zslurm.aegis.supervisor.in_memory.warm_pool import WarmPool
from zslurm.aegis.supervisor.job import Job
from zslurm.aegis.types import Fault, History
from zslurm.config.aegis import AegisSection
from zslurm.core.files import write_atomically
from zslurm.core.pauses import Pauses
from zslurm.core.processes import DetachedProcess
from zslurm.job.in_memory.store_client import StoreClient
from zslurm.run.events.event import Event
from zslurm.run.run_dir import RunDir
from zslurm.slurm.preemption import Preemption
from zslurm.train.progress import Phase

NODES = ("node0", "node1", "node2")
SILENT_S = 4.0
KILLED = "srun: error: node0: task 0: Killed"
LOST_PEERS = "srun: error: node0: task 0: Exited with exit code 1"


class Speakers:
    """In place of Agents: the nodes speak whenever they are asked, until they fall silent, and answer nothing."""

    def __init__(self, silent_since: dict[str, float], again_at: dict[str, float] | None = None) -> None:
        now = time.monotonic()
        self._silent = {node: now - ago for node, ago in silent_since.items()}
        self._again = {node: now + later for node, later in (again_at or {}).items()}
        self._last = {node: self._silent.get(node, now) for node in NODES}
        self._delivered: set[str] = set()

    def news(self) -> list[ReportReceived]:
        now = time.monotonic()
        for node in NODES:
            if node not in self._silent or now >= self._again.get(node, float("inf")):
                self._last[node] = now
                self._delivered.discard(node)
        fresh = [node for node in NODES if node not in self._delivered]
        self._delivered.update(fresh)
        return [
            ReportReceived(
                ProgressReport(Stamp(node, 1, time.time(), self._last[node]), 1), self._last[node], time.time()
            )
            for node in fresh
        ]

    def ask_about(self, question: AskAbout) -> None:
        """Ask nobody."""

    def ask(self, *_: Any, **__: Any) -> dict[str, Any]:
        return {}


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    """A run whose first attempt has begun."""
    made = RunDir(tmp_path / "runs" / "tiny")
    made.create(group_readable=False)
    made.attempt(1).logs.mkdir(parents=True)
    made.attempt(1).ranks.mkdir()
    return made


def _step(run: RunDir, output: str, then: str) -> RunningAttempt:
    """The first attempt, whose srun prints this and continues with a shell command."""
    attempt = run.attempt(1)
    process = DetachedProcess.start(
        ["sh", "-c", f"echo '{output}'; {then}"],
        env=os.environ,
        log=attempt.step_log,
        record_file=attempt.path / "step.json",
        exit_file=attempt.path / "step.exit",
    )
    return RunningAttempt(attempt, process, NODES)


@pytest.fixture
def running(run: RunDir) -> RunningAttempt:
    """An attempt whose first rank has lost its peers, and whose srun waits for the others."""
    return _step(run, LOST_PEERS, "sleep 60")


def _monitor(
    tmp_path: Path,
    running: RunningAttempt,
    agents: Speakers,
    events: list[dict[str, Any]] | None = None,
    pauses: Pauses | None = None,
    **aegis: Any,
) -> AttemptMonitor:
    """A monitor of the attempt; what it records goes to `events`."""
    settings = {"heartbeat_timeout_s": SILENT_S, "poll_s": 0.1, **aegis}
    spec = run_spec(tmp_path, aegis=settings, slurm={"nodes": 3, "ranks_per_node": 1})
    recorded = [] if events is None else events

    def record(event: Event) -> None:
        recorded.append(event.row)

    job = Job(RunDir(tmp_path / "runs" / "tiny"), spec, {}, "local-1", 0, record, pauses=pauses or Pauses())
    detector = Detector(spec.aegis)
    detector.begin(1, list(NODES), time.monotonic() - 60)
    return AttemptMonitor(FaultCollector(job, running, cast(Agents, agents), detector, spares=2))


def test_a_pause_is_told_before_what_came_after_it(
    tmp_path: Path, run: RunDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A failure and a request to stop that are there as the job resumes are later than the pause."""
    clock, told = [0.0], list[CoreEvent]()
    running = _step(run, KILLED, "sleep 60")
    monitor = _monitor(tmp_path, running, Speakers({}), pauses=Pauses(clock=lambda: clock[0]))
    collected = monitor.collected
    monkeypatch.setattr(collected, "tell", told.append)
    wait_for(lambda: KILLED in running.attempt.step_log.read_text(), "what srun prints")
    clock[0] = 100.0
    monitor.job.stop.signum = signal.SIGUSR2
    collected.tell_pause()
    monitor._stop.forward()
    collected.look("")
    collected.look("")
    kinds = [type(event).__name__ for event in told]
    assert (kinds.count("Paused"), kinds.count("Tick")) == (1, 2)
    assert kinds[0] == "Paused"
    assert {"StopChanged", "RanksFailed", "ReportReceived"} <= set(kinds)
    running.process.signal_group(signal.SIGKILL)


def test_without_agents_a_slow_look_is_no_pause(
    tmp_path: Path, running: RunningAttempt, monkeypatch: pytest.MonkeyPatch
) -> None:
    told = list[CoreEvent]()
    collected = _monitor(tmp_path, running, cast(Speakers, None), poll_s=5.0).collected
    monkeypatch.setattr(collected, "tell", told.append)
    real, later = time.monotonic, [0.0]
    monkeypatch.setattr(collected._pauses._pauses, "_clock", lambda: real() + later[0])
    for _ in range(3):
        later[0] += 20.0
        collected.look("")
    assert not any(type(event).__name__ == "Paused" for event in told)
    later[0] += 100.0
    collected.look("")
    assert sum(type(event).__name__ == "Paused" for event in told) == 1
    running.process.signal_group(signal.SIGKILL)


def test_ends_of_tasks_are_of_the_ranks_that_the_recoveries_left(tmp_path: Path, running: RunningAttempt) -> None:
    """Task 1 was replaced, then the ranks that were 0 and 2 got new numbers; a task keeps its own."""
    collected = _monitor(tmp_path, running, Speakers({})).collected
    assert collected.state.rank_of(4) == 4
    collected.tell(Recovered(frozenset([1])))
    assert [collected.state.rank_of(task) for task in range(5)] == [0, None, 2, 3, 4]
    collected.state.lost = {0, 3}
    collected.tell(Recovered(frozenset([0, 2]), frozenset(["node0"]), left_out=True))
    assert [collected.state.rank_of(task) for task in range(5)] == [None, None, None, 1, 2]
    assert collected.state.lost == {1}
    assert collected.state.dead_nodes == {"node0"}


def _dead(tmp_path: Path, running: RunningAttempt, agents: Speakers) -> list[str | None]:
    """Nodes that are dead when the attempt is over."""
    monitor = _monitor(tmp_path, running, agents)
    outcome = monitor.until_end()
    assert outcome.outcome == "failed"
    return [fault.node for fault in monitor.collected.state.faults if fault.kind == "node_dead"]


def test_nodes_that_die_together_are_found_together(tmp_path: Path, running: RunningAttempt) -> None:
    """The last word of one came a second before that of the other."""
    agents = Speakers({"node1": SILENT_S + 0.5, "node2": SILENT_S - 1.0})
    assert _dead(tmp_path, running, agents) == ["node1", "node2"]


def test_a_node_that_is_heard_again_is_not_dead(tmp_path: Path, running: RunningAttempt) -> None:
    agents = Speakers({"node1": SILENT_S + 0.5, "node2": SILENT_S - 1.5}, again_at={"node2": 1.0})
    assert _dead(tmp_path, running, agents) == ["node1"]


def test_a_file_system_that_does_not_answer_tells_nothing_new(
    tmp_path: Path, run: RunDir, running: RunningAttempt, monkeypatch: pytest.MonkeyPatch
) -> None:
    log = running.attempt.step_log
    wait_for(lambda: log.exists() and LOST_PEERS in log.read_text(), "srun to speak")
    spec = run_spec(tmp_path, slurm={"nodes": 3, "ranks_per_node": 1})
    job = Job(run, spec, {}, "local-1", 0, lambda event: None)
    monitor = AttemptMonitor(FaultCollector(job, running, None, Detector(spec.aegis)))

    def stalled(*_: object, **__: object) -> str:
        raise OSError(errno.EIO, "Input/output error")

    with monkeypatch.context() as away:
        away.setattr(Path, "read_text", stalled)
        monitor.collected.look("")
        assert monitor.collected.state.faults == []
    monitor.collected.look("")
    assert [fault.rank for fault in monitor.collected.state.faults] == [0], "it is heard of once it can be read"
    running.process.signal_group(signal.SIGKILL)


class Unkillable(Speakers):
    """A killed rank of node1 cannot die, and its record stands still, for so many looks."""

    def __init__(self, looks: int) -> None:
        super().__init__({})
        self._looks = looks
        self._asked = 0

    def news(self) -> list[ReportReceived]:
        row = RankProgress(1, 12, Phase.SETUP, -1, -1, 10_000.0)
        now = time.monotonic()
        stuck = ProgressReport(Stamp("node1", 2, time.time(), now), 1, (row,))
        return [*super().news(), *([ReportReceived(stuck, now, time.time())] if self._asked else [])]

    def ask(self, do: str, nodes: Sequence[str], **_: Any) -> dict[str, Answer]:
        self._asked += do == "clean_up"
        left = [[12, "D", "python"]] if self._asked <= self._looks else []
        stamp = Stamp("node1", 1, time.time(), time.monotonic())
        return {node: Answer(stamp, 1, not left, values={"left": left}) for node in nodes if node == "node1"}


def test_what_cannot_die_yet_is_waited_for_and_does_not_hang(tmp_path: Path, running: RunningAttempt) -> None:
    monitor = _monitor(tmp_path, running, Unkillable(4), settle_s=0.1, grace_s=0.1, teardown_s=0.5)
    monitor.until_end()
    assert [fault.kind for fault in monitor.collected.state.faults] == ["rank_exit"]


def test_a_link_that_came_back_long_ago_does_not_explain_lost_peers(
    tmp_path: Path, run: RunDir, running: RunningAttempt
) -> None:
    """Those who lost their peers get the time in which the cause may still show."""
    end = {"rank": 0, "node": "node0", "exit_code": 1, "time": time.time(), "error": "RuntimeError"}
    running.attempt.rank_end(0).write_text(json.dumps({**end, "message": "Connection closed by peer"}))
    now = time.time()
    flap = Fault("nic_link_down", "root", "nic", now - 900.0, "nic", "down", "node1", nic="n1")
    rows = [flap, replace(flap, time=now - 890.0, cleared=True)]
    recorded = [{**row.fields(), "event": "fault_detected", "attempt": 1, "fault_time": row.time} for row in rows]
    run.events.write_text("".join(json.dumps(row) + "\n" for row in recorded))
    run.metrics.write_text(json.dumps({"kind": "step", "attempt": 1, "step": 7, "time": now - 1.0}) + "\n")
    events: list[dict[str, Any]] = []
    monitor = _monitor(tmp_path, running, Speakers({}), events, settle_s=0.1, grace_s=0.5)
    monitor.until_end()
    (killed,) = [row for row in events if row["event"] == "step_killed"]
    assert killed["reason"] == "ranks lost their peers, and nothing else was found within 0.5 s"
    assert [fault.kind for fault in monitor.collected.state.faults] == ["peer_lost"], (
        "what the run overcame is forgotten"
    )


def test_a_step_that_somebody_cancelled_is_not_a_rank_that_was_killed(tmp_path: Path, run: RunDir) -> None:
    run.attempt(1).rank_log(0).write_text(
        "slurmstepd: error: *** STEP 1.2 ON node0 CANCELLED AT 2026-11-23T00:38:33 ***\n"
    )
    printed = (
        "srun: Job step aborted: Waiting up to 32 seconds for job step to finish.\n"
        "srun: error: node1: task 1: Killed"
    )
    monitor = _monitor(tmp_path, _step(run, printed, "exit 137"), Speakers({}))
    outcome = monitor.until_end()
    assert outcome.cause is not None and outcome.cause.rank is None
    assert outcome.cause.message == "the Slurm step 1.2 was cancelled (scancel)"
    attempt_state, settings = monitor.collected.state.summary(time.time(), outcome), AegisSection()
    root_cause = attribute(roots_of(attempt_state, settings), attempt_state, History(), settings)
    assert root_cause.root is not None and (root_cause.root.kind, root_cause.exclude) == ("slurm_cancelled", ())


def test_what_the_supervisor_before_ended_itself_was_not_cancelled(
    tmp_path: Path, run: RunDir, running: RunningAttempt
) -> None:
    run.events.write_text(json.dumps({"event": "step_killed", "attempt": 1, "reason": "so"}) + "\n")
    wait_for(lambda: running.attempt.step_log.exists(), "srun to start")
    with running.attempt.step_log.open("a") as log:
        log.write("srun: Job step aborted: Waiting up to 32 seconds for job step to finish.\n")
    monitor = _monitor(tmp_path, running, Speakers({}), settle_s=0.1, grace_s=0.1)
    monitor.until_end()
    assert "slurm_cancelled" not in {fault.kind for fault in monitor.collected.state.faults}


@pytest.mark.parametrize("recorded", [False, True])
def test_a_supervisor_that_died_between_a_failure_and_its_fault_is_followed_by_one_that_finds_it(
    tmp_path: Path, run: RunDir, running: RunningAttempt, recorded: bool
) -> None:
    """The failure is recorded first; with the fault, too, nothing is found twice."""
    fault = Fault("rank_exit", "root", "unknown", time.time(), "srun", "x", node="node0", rank=0).fields()
    fault_row = {"event": "fault_detected", "attempt": 1, "fault_time": fault.pop("time"), **fault}
    rows = [{"event": "ranks_ended", "attempt": 1, "ranks": [0], "node": "node0", "what": "x"}] + [
        fault_row
    ] * recorded
    run.events.write_text("".join(json.dumps(row) + "\n" for row in rows))
    log = running.attempt.step_log
    wait_for(lambda: log.exists() and LOST_PEERS in log.read_text(), "srun to speak")
    monitor = _monitor(tmp_path, running, Speakers({}), settle_s=0.1, grace_s=0.1)
    monitor.until_end()
    assert [(fault.kind, fault.rank) for fault in monitor.collected.state.faults if fault.role == "root"] == [
        ("rank_exit", 0)
    ]


class Away:
    """In place of Job.look_for_preemption: a controller that answers the third question, with a preemption."""

    def __init__(self) -> None:
        self.asked = 0

    def __call__(self, job: Job) -> bool:
        self.asked += 1
        if self.asked < 3:
            return False
        job.stop.preemption = Preemption(1.0, "requeue", done=False)
        return True


class Signalled(Speakers):
    """Speakers of whom one has got a signal."""

    def __init__(self) -> None:
        super().__init__({})
        self._signals = [AgentReport(Stamp("node0", 2, 0.0, 0.0), "signalled", {"signal": "SIGTERM"})]

    def news(self) -> list[ReportReceived]:
        signals, self._signals = self._signals, []
        return [*super().news(), *(ReportReceived(each, time.monotonic(), time.time()) for each in signals)]


def test_slurm_is_asked_until_it_answers_whether_a_signal_was_a_preemption(
    tmp_path: Path, running: RunningAttempt, monkeypatch: pytest.MonkeyPatch
) -> None:
    away = Away()
    monkeypatch.setattr(Job, "look_for_preemption", lambda job: away(job))
    monkeypatch.setattr(stop_forwarder, "LOOK_AGAIN_S", 0.0)
    events: list[dict[str, Any]] = []
    monitor = _monitor(tmp_path, running, Signalled(), events, save_s=0.2, settle_s=60.0, grace_s=60.0)
    monitor.until_end()
    assert (monitor.job.stop.preempted, away.asked) == ("requeue", 3)
    killed = next(event for event in events if event["event"] == "step_killed")
    assert killed["reason"] == (
        "the ranks did not save and stop within 0.2 s (aegis.save_s) when asked to (preempted)"
    )


def test_ranks_that_stopped_unasked_are_not_taken_for_a_persons_wish_while_slurm_is_away(
    tmp_path: Path, run: RunDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    for rank in range(3):
        end = {"rank": rank, "node": f"node{rank}", "exit_code": 75, "time": time.time(), "signal": "SIGTERM"}
        write_atomically(run.attempt(1).rank_end(rank), json.dumps(end))
    printed = "\n".join(f"srun: error: node{rank}: task {rank}: Exited with exit code 75" for rank in range(3))
    away = Away()
    monkeypatch.setattr(Job, "look_for_preemption", lambda job: away(job))
    an_hour_each = SimpleNamespace(monotonic=lambda: 3600.0 * away.asked, sleep=lambda _: None)
    monkeypatch.setattr(stop_forwarder, "time", an_hour_each)
    events: list[dict[str, Any]] = []
    monitor = _monitor(tmp_path, _step(run, printed, "exit 75"), Speakers({}), events)
    assert monitor.until_end().outcome == "interrupted"
    assert (monitor.job.stop.preempted, monitor.job.stop.signum, away.asked) == ("requeue", None, 3)
    assert [event["event"] for event in events].count("start_postponed") == 1


def test_a_supervisor_that_slurm_never_answers_ends_with_an_event_that_says_so(
    tmp_path: Path, run: RunDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    for rank in range(3):
        end = {"rank": rank, "node": f"node{rank}", "exit_code": 75, "time": time.time(), "signal": "SIGTERM"}
        write_atomically(run.attempt(1).rank_end(rank), json.dumps(end))
    asked: list[Job] = []
    monkeypatch.setattr(Job, "look_for_preemption", lambda job: bool(asked.append(job)))
    half_a_day_each = SimpleNamespace(monotonic=lambda: 43_200.0 * len(asked), sleep=lambda _: None)
    monkeypatch.setattr(stop_forwarder, "time", half_a_day_each)
    events: list[dict[str, Any]] = []
    printed = "\n".join(f"srun: error: node{rank}: task {rank}: Exited with exit code 75" for rank in range(3))
    monitor = _monitor(tmp_path, _step(run, printed, "exit 75"), Speakers({}), events)
    assert monitor.until_end().outcome == "interrupted"
    (given_up,) = (event for event in events if event["event"] == "wait_given_up")
    assert "Slurm has not answered for 86400 s whether it preempts the job" in given_up["reason"]
    assert monitor.job.stop.name == "SIGTERM"


def test_a_rank_that_exited_with_0_was_not_killed_if_its_agent_saw_it_go(tmp_path: Path, run: RunDir) -> None:
    for rank in (0, 2):
        end = {"rank": rank, "node": f"node{rank}", "exit_code": 1, "time": time.time(), "step": 7}
        lost = {"error": "RuntimeError", "message": "Connection closed by peer"}
        write_atomically(run.attempt(1).rank_end(rank), json.dumps(end | lost))
    printed = "\n".join(f"srun: error: node{rank}: task {rank}: Exited with exit code 1" for rank in (0, 2))
    gone = {"event": "ranks_ended", "ranks": [1], "node": "node1", "what": GONE, "by_agent": True}
    run.events.write_text(json.dumps(gone | {"attempt": 1, "time": time.time()}) + "\n")
    outcome = _monitor(tmp_path, _step(run, printed, "exit 1"), Speakers({})).until_end()
    assert outcome.cause is not None
    assert (outcome.cause.rank, outcome.cause.message) == (1, LINE)


def test_ranks_that_stop_before_the_signal_is_passed_on_are_known_to_be_preempted(
    tmp_path: Path, run: RunDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A preemption without a grace time signals all at once: ranks, and the supervisor between two polls."""
    for rank in range(3):
        end = {"rank": rank, "node": f"node{rank}", "exit_code": 75, "time": time.time(), "signal": "SIGTERM"}
        write_atomically(run.attempt(1).rank_end(rank), json.dumps(end))
    printed = "\n".join(f"srun: error: node{rank}: task {rank}: Exited with exit code 75" for rank in range(3))
    events: list[dict[str, Any]] = []
    monitor = _monitor(tmp_path, _step(run, printed, "exit 75"), Speakers({}), events)

    def preempted(job: Job) -> bool:
        job.stop.preemption = Preemption(1.0, "cancel", done=True)
        return True

    monkeypatch.setattr(Job, "look_for_preemption", preempted)
    monkeypatch.setattr(stop_forwarder.StopForwarder, "forward", lambda forwarder: None)
    monitor.job.stop.signum = signal.SIGTERM
    assert monitor.until_end().outcome == "interrupted"
    assert monitor.job.stop.preempted == "cancel"
    assert [event["signal"] for event in events if event["event"] == "signal"] == ["SIGTERM"]


def test_the_former_process_of_a_replaced_rank_may_end_late(tmp_path: Path, run: RunDir) -> None:
    """It froze, and ends when it wakes up; the rank itself trains elsewhere."""
    running = _step(run, "srun: error: node1: task 1: Exited with exit code 1", "sleep 60")
    log = running.attempt.step_log
    wait_for(lambda: log.exists() and "task 1" in log.read_text(), "srun's message")
    collected = _monitor(tmp_path, running, Speakers({})).collected
    collected.tell(Recovered(frozenset([1]), frozenset(["node1"])))
    collected.look("")
    assert (collected.state.lost, collected.state.failures, collected.state.failed_at) == (set(), [], None)
    with log.open("a") as output:
        output.write("srun: error: node2: task 2: Killed\n")
    collected.look("")
    assert collected.state.lost == {2}
    running.process.signal_group(signal.SIGKILL)


def test_an_attempt_whose_store_has_ended_is_ended(tmp_path: Path, run: RunDir) -> None:
    """Its ranks meet there for every save, and are asked to stop there."""
    running = _step(run, "ranks train", "sleep 60")
    store = SimpleNamespace(has_ended=True, never_listened=False, poll=list, stop=lambda: None)
    warm = SimpleNamespace(ended=list, end=lambda: None, runs=False)
    state = MemoryState.of_start(NODES, 1, ())
    memory = MemoryShell(
        running.attempt, cast(StoreClient, store), cast(WarmPool, warm), state, NODES, lambda *_: FewerNodes()
    )
    outcome = _monitor(tmp_path, replace(running, memory=memory), Speakers({})).until_end()
    assert outcome.cause is not None
    assert "the ranks' store server has ended, and without it ranks cannot save" in outcome.cause.message
    assert running.process.poll() is not None


def test_an_attempt_whose_store_could_not_be_taken_over_is_ended_with_the_reason(
    tmp_path: Path, run: RunDir
) -> None:
    running = replace(_step(run, "ranks train", "sleep 60"), broken="the store server does not answer")
    outcome = _monitor(tmp_path, running, Speakers({})).until_end()
    assert outcome.cause is not None
    assert "the store server does not answer" in outcome.cause.message
    assert running.process.poll() is not None
