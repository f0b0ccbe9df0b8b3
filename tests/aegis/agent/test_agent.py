"""The agent as it is: a child process that is told things and tells things, whatever hangs or breaks around it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import psutil
import pytest

from tests.aegis.agent_process import AgentProcess, make_run
from tests.aegis.orphans import environ_of, orphans, runs
from tests.fake_sysfs import FakeNode, mi300x_pollara
from tests.waiting import wait_for
from zslurm.aegis.agent.attempt_baselines import NodeMemory
from zslurm.aegis.protocol import (
    AgentReport,
    Command,
    ProgressReport,
    SensorReport,
)
from zslurm.run.run_dir import AttemptDir, RunDir
from zslurm.run.supervisor_lease import take
from zslurm.train.progress import Phase, ProgressWriter

ON_NODE0 = {"SLURMD_NODENAME": "node0"}


@pytest.fixture
def agents() -> Iterator[list[AgentProcess]]:
    started: list[AgentProcess] = []
    yield started
    for agent in started:
        agent.close()


@pytest.fixture
def run(tmp_path: Path) -> Iterator[RunDir]:
    run = make_run(tmp_path)
    yield run
    NodeMemory(run, ON_NODE0, 0).forget()  # agents that were killed could not


@pytest.fixture
def agent(agents: list[AgentProcess], run: RunDir, tmp_path: Path) -> AgentProcess:
    agents.append(AgentProcess.here(run, "--generation=g1", ZSLURM_SYSROOT=str(tmp_path / "root")))
    return agents[-1]


@pytest.fixture
def attempt(run: RunDir) -> Iterator[AttemptDir]:
    """Attempt 2, of which this node has records."""
    attempt = run.attempt(2)
    progress = attempt.progress(ON_NODE0)
    progress.mkdir()
    yield attempt
    for record in progress.glob("*"):
        record.unlink()
    with suppress(FileNotFoundError):
        progress.rmdir()


def test_it_says_that_it_started_and_then_where_the_ranks_are(agent: AgentProcess, attempt: AttemptDir) -> None:
    started = agent.wait_for(AgentReport)
    assert (started.event, started.stamp.node, started.stamp.seq) == ("started", "node0", 1)
    assert started.values == {"pid": agent.process.pid, "generation": "g1"}
    assert (agent.fresh_progress().attempt, agent.fresh_progress().ranks) == (0, ())
    writer = ProgressWriter(5, 2, str(attempt.progress(ON_NODE0)))
    writer.update(phase=Phase.STEP, step=17)
    agent.beat(attempt=2)
    report = agent.wait_for(ProgressReport, lambda report: report.ranks)
    (rank,) = report.ranks
    assert report.attempt == 2
    assert (rank.rank, rank.pid, rank.phase, rank.step) == (5, os.getpid(), Phase.STEP, 17)
    assert agent.other_lines == []
    seqs = [report.stamp.seq for report in list(agent.reports)]
    assert sorted(seqs) == list(range(1, len(seqs) + 1))


def test_a_damaged_record_does_not_hide_the_others(agent: AgentProcess, attempt: AttemptDir) -> None:
    directory = attempt.progress(ON_NODE0)
    ProgressWriter(0, 2, str(directory)).close()
    (directory / "rank-00001").write_bytes(b"ZPRG\x01")
    agent.beat(attempt=2)
    report = agent.wait_for(ProgressReport, lambda report: report.ranks)
    assert report.ok and [rank.rank for rank in report.ranks] == [0]


def test_quit_ends_it(agent: AgentProcess) -> None:
    agent.wait_for(AgentReport)
    agent.send(Command("quit"))
    assert agent.wait() == 0
    assert agent.events() == ["started", "ended"]


def test_it_steps_back_and_survives_the_signals_of_a_job_that_ends(agent: AgentProcess) -> None:
    agent.wait_for(AgentReport)
    assert psutil.Process(agent.process.pid).nice() >= 10
    names = ("SIGTERM", "SIGINT", "SIGHUP", "SIGUSR1", "SIGUSR2")
    for name in names:
        os.kill(agent.process.pid, signal.Signals[name])
    for name in names:
        agent.wait_for(AgentReport, lambda report, name=name: report.values.get("signal") == name)
    agent.fresh_progress()
    assert agent.process.poll() is None


def test_garbage_on_its_input_is_ignored(agent: AgentProcess) -> None:
    agent.send("\n", "garbage\n", '{"do": "dance"}\n', "{" * 100_000 + "\n", '{"heartbeat": "x"}\n')
    agent.send(Command("clean_up", 4, attempt=2))
    assert agent.answer(4).ok
    assert [report.event for report in agent.of(AgentReport)] == ["started"]


def test_commands_for_others_are_not_obeyed(agent: AgentProcess) -> None:
    agent.send(Command("clean_up", 1, nodes=("node1",)), Command("clean_up", 2, nodes=("node7", "node0")))
    agent.send(Command("quit", nodes=("node1",)))
    assert agent.answer(2).ok
    agent.fresh_progress()
    assert [answer.id for answer in agent.reports if hasattr(answer, "id")] == [2]


def test_it_sweeps_what_an_attempt_left(agent: AgentProcess, attempt: AttemptDir) -> None:
    with orphans() as left:
        pid = left.start(environ_of(attempt))
        agent.send(Command("clean_up", 1, attempt=2, kill=False))
        answer = agent.answer(1)
        assert (answer.ok, answer.why) == (False, "1 process is left")
        assert answer.values["left"][0][0] == pid
        assert runs(pid)
        agent.send(Command("clean_up", 2, attempt=2))
        answer = agent.answer(2)
        assert answer.ok and answer.values["killed"][0][0] == pid
        assert (answer.values["left"], answer.values["gpu_released"]) == ([], None)
        assert answer.values["progress_removed"] is True
        assert not runs(pid)


def test_it_says_which_ranks_it_could_not_ask_for_stacks(agent: AgentProcess, attempt: AttemptDir) -> None:
    ProgressWriter(5, 2, str(attempt.progress(ON_NODE0))).close()
    agent.send(Command("stacks", 1, attempt=2))
    answer = agent.answer(1)
    gone = f"process {os.getpid()} is gone"
    assert (answer.ok, answer.why) == (False, f"rank 5: {gone}")
    assert answer.values == {"ranks": [], "missed": [[5, gone]]}


def test_without_a_supervisor_it_ends(agents: list[AgentProcess], tmp_path: Path) -> None:
    run = make_run(tmp_path, aegis={"standby_s": 1})
    agents.append(AgentProcess.here(run))
    agents[0].hang_up()
    assert agents[0].wait() == 0
    assert agents[0].events() == ["started", "silent", "ended"]


def test_a_line_of_the_kernel_log_is_told(agents: list[AgentProcess], tmp_path: Path) -> None:
    log = tmp_path / "kern-node0.log"
    log.write_text("[    1.0] amdgpu 0000:1c:00.0: {1}uncorrectable hardware error(OLD) detected!\n")
    run = make_run(tmp_path, sensors={"kernel_log": str(tmp_path / "kern-%n.log")})
    agents.append(AgentProcess.here(run))
    agents[0].sensed("kernel_log", lambda report: report.ok)
    line = "amdgpu 0000:42:00.0: {1}uncorrectable hardware error(ERREVENT_ATHUB_INTERRUPT) detected!"
    with log.open("a") as file:
        file.write(f"[13850.912648] {line}\n")
    (fault,) = agents[0].sensed("kernel_log", lambda report: report.faults).faults
    assert (fault.kind, fault.role, fault.node, fault.gpu, fault.line) == (
        "gpu_ras_uncorrectable", "root", "node0", "0000:42:00.0", line,
    )  # fmt: skip


def test_all_sensors_work_on_a_node_of_their_own(agents: list[AgentProcess], tmp_path: Path) -> None:
    node = mi300x_pollara(tmp_path / "node0")
    node.write("proc/meminfo", "MemTotal: 1000 kB\nMemAvailable: 900 kB")
    run = make_run(tmp_path, sensors={"disk_free_gb": 0})
    agents.append(AgentProcess.here(run, ZSLURM_SYSROOT=str(tmp_path / "%n")))
    agent = agents[0]
    assert {name: agent.sensed(name).ok for name in ("clock", "disk", "gpu", "host", "nic")} == {
        "clock": True, "disk": True, "gpu": False, "host": True, "nic": True,
    }  # fmt: skip
    node.take_nic_down("ionic_3")
    (fault,) = agent.sensed("nic", lambda report: report.faults).faults
    assert (fault.kind, fault.nic, fault.node) == ("nic_link_down", "ionic_3", "node0")


@pytest.fixture
def rails(tmp_path: Path) -> FakeNode:
    """A node whose NICs the agent watches."""
    return mi300x_pollara(tmp_path / "root")


def watching(agents: list[AgentProcess], run: RunDir, rails: FakeNode, attempt: int, *, told: int) -> AgentProcess:
    """An agent of an attempt, which it is `told` of when it starts, after its first look at the NICs."""
    agents.append(AgentProcess.here(run, f"--attempt={told}", ZSLURM_SYSROOT=str(rails.root)))
    agents[-1].keep_beating(attempt=attempt)
    agents[-1].sensed("nic", lambda report: report.first)
    return agents[-1]


def remembered(run: RunDir, attempt: int) -> Path:
    """Where agents remember the attempt; wait until they do."""
    path = run.node_memory(ON_NODE0, attempt)
    wait_for(lambda: path.exists() and b'"nic"' in path.read_bytes(), "the NICs to be remembered")
    return path


def test_what_breaks_while_an_agent_is_replaced_is_told_by_the_next(
    agents: list[AgentProcess], run: RunDir, rails: FakeNode
) -> None:
    first = watching(agents, run, rails, 1, told=0)
    remembered(run, 1)
    first.process.kill()
    rails.take_nic_down("ionic_3")
    second = watching(agents, run, rails, 1, told=1)
    (fault,) = second.sensed("nic", lambda report: report.faults).faults
    assert (fault.kind, fault.role, fault.nic) == ("nic_link_down", "root", "ionic_3")
    assert kinds(second) == {"nic_link_down"}
    second.send(Command("quit"))
    second.wait()


def kinds(agent: AgentProcess) -> set[str]:
    return {fault.kind for report in agent.of(SensorReport) for fault in report.faults}


@pytest.mark.parametrize("damage", ["missing", "no JSON", "of another kind"])
def test_a_memory_that_is_lost_is_recorded_and_the_agent_begins_again(
    agents: list[AgentProcess], run: RunDir, rails: FakeNode, damage: str
) -> None:
    first = watching(agents, run, rails, 1, told=0)
    path = remembered(run, 1)
    first.process.kill()
    first.wait()
    if damage == "missing":
        path.unlink()
    elif damage == "no JSON":
        path.write_text("{")
    else:
        path.write_text(path.read_text().replace('"trouble": ""', '"trouble": [7]'))
    second = watching(agents, run, rails, 1, told=1)

    def lost() -> list[str]:
        faults = [fault for report in second.of(SensorReport) for fault in report.faults]
        return [fault.line for fault in faults if (fault.kind, fault.role) == ("baseline_lost", "advisory")]

    (line,) = wait_for(lost, "a word on what is not known")
    assert line.endswith("again")
    rails.take_nic_down("ionic_3")
    second.sensed("nic", lambda report: any(fault.kind == "nic_link_down" for fault in report.faults))
    second.send(Command("quit"))
    second.wait()


def test_a_new_attempt_is_remembered_in_place_of_the_old_and_the_end_of_the_run_removes_it(
    agents: list[AgentProcess], run: RunDir, rails: FakeNode
) -> None:
    agent = watching(agents, run, rails, 1, told=0)
    first = remembered(run, 1)
    agent.stop_beating()
    agent.keep_beating(attempt=2)
    second = remembered(run, 2)
    assert not first.exists()
    agent.send(Command("quit", nodes=("node0",)))
    agent.wait()
    assert second.exists(), "another agent will take its place"
    agent = watching(agents, run, rails, 2, told=2)
    agent.send(Command("quit"))
    agent.wait()
    assert not second.exists()


def test_an_agent_whose_generation_was_replaced_ends(agents: list[AgentProcess], run: RunDir) -> None:
    """Its supervisor died, and the next one holds the lease: it waits for no silence."""
    take(run, "g1")
    job = {"SLURM_JOB_ID": "12", "SLURM_JOB_NODELIST": "node[0-1]", "ZSLURM_BATCH_NODE": "node1"}
    agents.append(AgentProcess.here(run, "--generation=g1", **job))
    agents[0].wait_for(AgentReport)
    take(run, "g2")
    agents[0].hang_up()
    assert agents[0].wait() == 0
    assert agents[0].events() == ["started", "ended"]
    assert list(run.path.glob("deputy-*")) == []


def test_it_is_light() -> None:
    program = (
        "import sys; from zslurm.aegis.agent import main, sensor; sensor.all_sensors(); "
        "print(*{'torch', 'numpy', 'h5py', 'submitit'} & set(sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.split() == []


def test_what_is_no_run_is_said_in_one_line(agents: list[AgentProcess], tmp_path: Path) -> None:
    agents.append(AgentProcess.here(RunDir(tmp_path / "nothing")))
    assert agents[0].wait() == 2
    assert agents[0].process.stderr is not None
    message = agents[0].process.stderr.read()
    assert message == f"agent: {tmp_path}/nothing: not a run directory (it has no config.json)\n"
