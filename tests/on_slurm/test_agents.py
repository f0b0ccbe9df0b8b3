"""Agents on a real Slurm: one on each node next to whatever runs there, through srun's own input and output."""

from __future__ import annotations

import os
import shutil
import signal
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import psutil
import pytest

from tests import forked
from tests.aegis.agent_process import AgentProcess, make_run
from tests.on_slurm.cluster.as_user import COMMAND_EVERY_S
from tests.on_slurm.cluster.slurm_cluster import SlurmCluster
from tests.waiting import wait_for
from zslurm.aegis.protocol import MARK, AgentReport, Answer, Command, Heartbeat, ProgressReport
from zslurm.job.step import ATTEMPT_VARIABLE, attempt_mark
from zslurm.run.run_dir import AttemptDir, RunDir

pytestmark = pytest.mark.slurm

NODES, RANKS_PER_NODE = 3, 2

RANK = """
import os, sys, time
from pathlib import Path
from zslurm.train.progress import Phase, ProgressWriter, dump_stacks_on_signal
from zslurm.run.run_dir import RunDir
attempt = RunDir(Path(sys.argv[1])).attempt(1)
directory = attempt.progress(os.environ)
directory.mkdir(mode=0o700, exist_ok=True)
dump_stacks_on_signal()
writer = ProgressWriter(int(os.environ["SLURM_PROCID"]), 1, str(directory))
def train_for_ever():
    for step in range(10**9):
        writer.update(phase=Phase.STEP, step=step)
        time.sleep(0.1)
train_for_ever()
"""


class Site:
    """A job of three nodes with ranks that only count steps, and agents next to them."""

    def __init__(self, cluster: SlurmCluster, directory: Path, standby_s: float) -> None:
        self.cluster, self.directory = cluster, directory
        sensors = {"kernel_log": str(directory / "kern-%n.log"), "progress_s": 0.5, "period_s": 0.5}
        self.run: RunDir = make_run(directory, sensors=sensors, aegis={"standby_s": standby_s})
        (directory / "rank.py").write_text(RANK)
        (directory / "logs").mkdir()
        for path in (directory, *directory.rglob("*")):
            shutil.chown(path, cluster.user.pw_uid, cluster.user.pw_gid)
        self.python = cluster.installation().python
        self.agents: list[AgentProcess] = []
        self.job_id = ""

    @property
    def attempt(self) -> AttemptDir:
        return self.run.attempt(1)

    def submit(self) -> None:
        """The job; its nodes are named from now on."""
        ranks = (
            f"srun --kill-on-bad-exit=0 --no-kill --output={self.directory}/logs/rank-%t.log "
            f"env {ATTEMPT_VARIABLE}={attempt_mark(self.attempt)} {self.python} -u {self.directory}/rank.py "
            f"{self.run.path}"
        )
        self.job_id = self.cluster.sbatch(
            f"{ranks}\nsleep 3600",
            f"--nodes={NODES}", f"--ntasks-per-node={RANKS_PER_NODE}", "--no-kill", "--output=/dev/null",
        )  # fmt: skip
        wait_for(lambda: self.state() == "RUNNING", "the job to run", every_s=COMMAND_EVERY_S)

    def state(self) -> str:
        return self.cluster.run(["squeue", "--noheader", "--format=%T", f"--jobs={self.job_id}"]).stdout.strip()

    def start_agents(self) -> AgentProcess:
        command: list[str | Path] = [
            "srun", f"--jobid={self.job_id}", "--overlap", "--no-kill", f"-N{NODES}", f"-n{NODES}",
            "--ntasks-per-node=1", "--mem=0", "--cpu-bind=none", "--job-name=agents-1",
            self.python, "-P", "-u", "-m", "zslurm.aegis.agent.main", self.run.path,
        ]  # fmt: skip
        env = self.cluster.environment | self.cluster.forking(forked.OTHERS)
        self.agents.append(
            AgentProcess.start(
                command, env, cwd=self.directory, extra_groups=[],
                user=self.cluster.user.pw_uid, group=self.cluster.user.pw_gid,
            )
        )  # fmt: skip
        return self.agents[-1]

    @property
    def nodes(self) -> list[str]:
        return sorted({report.stamp.node for report in self.agents[-1].of(AgentReport)})

    def ranks_of(self, node: str) -> list[int]:
        """What the newest report of a node names."""
        reports = self.agents[-1].of(ProgressReport, lambda report: report.stamp.node == node)
        return [rank.rank for rank in reports[-1].ranks] if reports else []

    def agent_processes(self) -> list[psutil.Process]:
        return [
            process
            for process in psutil.process_iter(["cmdline", "name"])
            if "zslurm.aegis.agent.main" in (process.info["cmdline"] or [])
            and str(self.run.path) in process.info["cmdline"]
            and process.info["name"] != "srun"
        ]

    def progress(self, node: str) -> Path:
        """Where the ordinary user's ranks keep their records on a node."""
        mine = str(self.attempt.progress({"SLURMD_NODENAME": node}))
        return Path(mine.replace(f"-{os.getuid()}-", f"-{self.cluster.user.pw_uid}-"))

    def close(self) -> None:
        for agent in self.agents:
            agent.close()


@pytest.fixture
def site(slurm_cluster: SlurmCluster, request: pytest.FixtureRequest) -> Iterator[Site]:
    """Agents that wait for a heartbeat for so many seconds as a test passes, by default longer than any test."""
    directory = slurm_cluster.user_dir("agents-test")
    made = Site(slurm_cluster, directory, getattr(request, "param", 600.0))
    made.submit()
    yield made
    made.close()
    slurm_cluster.restore()
    for node in slurm_cluster.node_names:
        shutil.rmtree(made.progress(node), ignore_errors=True)
    shutil.rmtree(directory, ignore_errors=True)


def _has_stacks(log: Path) -> bool:
    return "in train_for_ever" in log.read_text()


def test_agents_beside_the_ranks(site: Site) -> None:
    agents = site.start_agents()
    wait_for(lambda: len(site.nodes) == NODES, "every node's agent to start")
    first, second, third = site.nodes
    started = agents.of(AgentReport)
    assert len(started) == NODES

    # What each node's ranks do, and where they hang.
    agents.keep_beating(attempt=1)
    wait_for(lambda: all(len(site.ranks_of(node)) == 2 for node in site.nodes), "the progress of all ranks")
    assert sorted(rank for node in site.nodes for rank in site.ranks_of(node)) == [0, 1, 2, 3, 4, 5]
    agents.send(Command("stacks", 1, attempt=1))
    answers = [agents.answer(1, node) for node in site.nodes]
    assert [answer.why for answer in answers] == [""] * NODES
    assert sorted(rank for answer in answers for rank in answer.values["ranks"]) == [0, 1, 2, 3, 4, 5]
    for rank in range(6):
        log = site.directory / f"logs/rank-{rank}.log"
        wait_for(partial(_has_stacks, log), f"the stacks of rank {rank}")

    # A fault of one node is that node's.
    (site.directory / f"kern-{first}.log").touch()
    agents.sensed("kernel_log", lambda report: report.stamp.node == first and report.ok)
    with (site.directory / f"kern-{first}.log").open("a") as file:
        file.write("[13850.912648] amdgpu 0000:42:00.0: {1}uncorrectable hardware error(X) detected!\n")
    (fault,) = agents.sensed("kernel_log", lambda report: report.faults).faults
    assert (fault.kind, fault.node) == ("gpu_ras_uncorrectable", first)

    # One node is cleaned up, then all: processes of others stay, though all nodes share one /proc.
    agents.send(Command("clean_up", 2, attempt=1, nodes=(second,)))
    answer = agents.answer(2, second)
    assert (answer.ok, len(answer.values["killed"]), answer.values["left"]) == (True, 2, [])
    wait_for(lambda: site.ranks_of(second) == [], "the records to be gone")
    assert [site.progress(node).exists() for node in site.nodes] == [True, False, True]
    assert [len(site.ranks_of(node)) for node in (first, third)] == [2, 2]
    agents.send(Command("clean_up", 3, attempt=1))
    assert [len(agents.answer(3, node).values["killed"]) for node in site.nodes] == [2, 0, 2]
    assert not any(site.progress(node).exists() for node in site.nodes)

    agents.send(Command("check", 4, nodes=(third,)))
    assert agents.answer(4, third).ok
    assert {answer.stamp.node for answer in agents.of(Answer, lambda answer: answer.id == 4)} == {third}

    agents.send(Command("quit"))
    agents.stop_beating()
    assert agents.wait() == 0
    assert [line for line in agents.other_lines if MARK in line] == [], "no line was cut or mixed with another"


@pytest.mark.parametrize("site", [20.0], indirect=True)
def test_agents_outlive_srun_and_end_by_themselves(site: Site) -> None:
    agents = site.start_agents()
    wait_for(lambda: len(site.nodes) == NODES, "every node's agent to start")
    agents.send(Heartbeat(1.0, 0, "first"))
    processes = site.agent_processes()
    assert len(processes) == NODES
    os.kill(agents.process.pid, signal.SIGKILL)
    assert all(process.is_running() for process in processes)
    wait_for(
        lambda: not any(process.is_running() for process in processes),
        "the agents to give up their supervisor",
        every_s=COMMAND_EVERY_S,
    )
    assert site.state() == "RUNNING"
