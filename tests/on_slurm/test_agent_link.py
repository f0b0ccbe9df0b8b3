"""Agents on a real Slurm: they speak through srun, are replaced when they die, tell of a dead node by silence,
and act when the supervisor's node is gone.

The seconds from kill to notice are printed (pytest -s), not asserted.
"""

from __future__ import annotations

import contextlib
import os
import shlex
import shutil
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests import forked
from tests.checkout import ROOT
from tests.on_slurm.cluster.as_user import COMMAND_EVERY_S
from tests.on_slurm.cluster.slurm_cluster import SlurmCluster
from tests.submit.specs import run_spec
from tests.waiting import wait_for
from zslurm.run.events import Submitted
from zslurm.run.run_dir import RunDir
from zslurm.submit.submit import record_action
from zslurm.train.jsonl import read_jsonl

pytestmark = pytest.mark.slurm

N_NODES = 4
SOON_S, NEVER_S = 15.0, 600.0
"""When the deputy acts: where it is to act, much later than a heartbeat that only comes slowly."""


class WatchedJob:
    """A job with --no-kill whose batch script watches ranks that walk in step (agent_driver.py)."""

    def __init__(self, cluster: SlurmCluster, directory: Path, standby_s: float) -> None:
        self.cluster = cluster
        spec = run_spec(
            directory,
            cluster={"name": "lab", "launcher": "slurm", "gpus_per_node": 8, "gpu_type": "mi300x"},
            slurm={"nodes": N_NODES},
            aegis={"standby_s": standby_s},
        )
        self.run = RunDir(directory / "runs" / "tiny")
        self.run.create(group_readable=False)
        self.run.config.write_text(spec.model_dump_json())
        python, driver = cluster.installation().python, "tests.on_slurm.cluster.agent_driver"
        env = cluster.forking([*forked.OTHERS, driver], {"PYTHONPATH": str(ROOT), "PYTHONSAFEPATH": "1"})
        # As in the script of a run: a supervisor that dies is started again.
        script = f"""
            [ "${{SLURM_RESTART_COUNT:-0}}" = 0 ] || {{
                echo "$SLURM_JOB_NODELIST" > {self.run.path}/started-again; exit 0; }}
            export TMPDIR=/tmp {shlex.join(f"{name}={value}" for name, value in env.items())}
            while :; do {python} -m {driver} watch {self.run.path}; sleep 1; done
        """
        self.job_id = ""
        for path in [directory, *directory.rglob("*")]:
            shutil.chown(path, cluster.user.pw_uid, cluster.user.pw_gid)
        self.job_id = cluster.sbatch(
            script, f"-N{N_NODES}", "--ntasks-per-node=2", "--no-kill", "--requeue", "--gpus-per-node=mi300x:8",
            f"--output={self.run.path}/batch.log", "--open-mode=append",
        )  # fmt: skip
        record_action(self.run, Submitted(job_id=self.job_id), spec)

    def rows(self, kind: str) -> list[dict[str, Any]]:
        return [row for row in read_jsonl(self.run.path / "watched.jsonl") if row["kind"] == kind]

    def wait_for_row(self, what: str, **fields: Any) -> dict[str, Any]:
        """The first row of this kind with these fields (of the fault, if it is one)."""

        def found() -> dict[str, Any] | None:
            for row in self.rows(what):
                place = row["fault"] if what == "fault" else row
                if all(place.get(name) == value for name, value in fields.items()):
                    return row
            return None

        return wait_for(found, f"{what} {fields}; the batch script says: {self.said()}")

    def said(self) -> str:
        with contextlib.suppress(OSError):
            return (self.run.path / "batch.log").read_text()[-2000:]
        return ""

    def wait_for_steps(self, count: int = 3) -> None:
        """Wait until the ranks have gone on for so many steps."""
        now = max((row["step"] for row in self.rows("step")), default=0)
        wait_for(
            lambda: any(row["step"] >= now + count for row in self.rows("step")),
            f"{count} more steps after {now}; the batch script says: {self.said()}",
        )

    def agent_on(self, node: str) -> psutil.Process:
        """The agent's process on a node; processes of all nodes live on this machine."""
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.Error):
                words, environ = process.cmdline(), process.environ()
                mine = environ.get("SLURM_JOB_ID") == self.job_id and environ.get("SLURMD_NODENAME") == node
                if (
                    mine
                    and "zslurm.aegis.agent.main" in words
                    and str(self.run.path) in words
                    and "srun" not in words[0]
                ):
                    return process
        raise AssertionError(f"no agent on {node}")

    def nodes(self) -> list[str]:
        listed = self.cluster.run(["squeue", "-h", "-j", self.job_id, "-o", "%N"]).stdout.strip()
        return self.cluster.run(["scontrol", "show", "hostnames", listed]).stdout.split()

    def events(self, kind: str) -> list[dict[str, Any]]:
        return [row for row in read_jsonl(self.run.events) if row["event"] == kind]


@pytest.fixture
def job(slurm_cluster: SlurmCluster, request: pytest.FixtureRequest) -> Iterator[WatchedJob]:
    directory = slurm_cluster.user_dir("agent-test")
    watched = WatchedJob(slurm_cluster, directory, getattr(request, "param", NEVER_S))
    yield watched
    slurm_cluster.restore()
    shutil.rmtree(directory, ignore_errors=True)


def say(words: str) -> None:
    print(f"\n{words}", file=sys.stderr)


def test_a_killed_agent_is_replaced_and_a_dead_node_is_noticed(job: WatchedJob) -> None:
    started = job.wait_for_row("agents_started")
    nodes = job.nodes()
    assert started["nodes"] == "node[0-3]"
    job.wait_for_steps()

    first = job.agent_on(nodes[2])
    killed = time.time()
    first.kill()
    lost = job.wait_for_row("agent_lost", node=nodes[2])
    again = job.wait_for_row("agent_restarted", nodes=nodes[2])
    say(f"agent killed: noticed after {lost['time'] - killed:.1f} s, back after {again['time'] - killed:.1f} s")
    assert job.agent_on(nodes[2]).pid != first.pid
    job.wait_for_steps()
    assert job.rows("fault") == [], "the training continued"

    job.wait_for_steps(12)  # the detector needs a step time before it can call a halt unusual
    killed = time.time()
    job.cluster.kill_node(nodes[3])
    row = job.wait_for_row("fault", kind="node_dead")
    say(f"node killed: noticed after {row['time'] - killed:.1f} s: {row['fault']['line']}")
    assert row["fault"]["node"] == nodes[3]
    assert "its slurmd refuses connections" in row["fault"]["line"], "its witnesses were asked"
    assert {row["fault"]["node"] for row in job.rows("fault")} == {nodes[3]}, "nobody else is blamed"


def test_a_killed_supervisor_is_replaced_and_its_agents_with_it(job: WatchedJob) -> None:
    job.wait_for_row("agents_started")
    job.wait_for_steps()
    nodes = job.nodes()
    older = [job.agent_on(node) for node in nodes]
    os.kill(job.rows("watcher")[0]["pid"], signal.SIGKILL)
    wait_for(lambda: len(job.rows("agents_started")) == 2, "the agents of the next supervisor")
    wait_for(lambda: not any(agent.is_running() for agent in older), "the older agents to be gone")
    generations = {row["generation"] for row in job.rows("agents_started")}
    assert len(generations) == 2
    job.wait_for_steps()
    assert {job.agent_on(node).pid for node in nodes}.isdisjoint({agent.pid for agent in older})
    assert job.rows("fault") == []
    assert job.events("deputy_acted") == [], "nobody acts where a supervisor is there"


@pytest.mark.parametrize("job", [SOON_S], indirect=True)
def test_the_deputy_requeues_a_job_whose_batch_node_died(job: WatchedJob) -> None:
    """Slurm itself leaves a job with --no-kill running without its batch script."""
    job.wait_for_row("agents_started")
    job.wait_for_steps()
    nodes = job.nodes()
    killed = time.time()
    job.cluster.kill_node(nodes[0])
    wait_for(lambda: job.events("deputy_acted"), "the deputy to act")
    acted = job.events("deputy_acted")[0]
    say(f"batch node killed: the deputy acted after {acted['time'] - killed:.1f} s")
    assert acted["node"] in nodes[1:]
    assert (acted["batch_node"], acted["job_id"]) == (nodes[0], job.job_id)

    def state() -> str:
        return job.cluster.run(["squeue", "-h", "-t", "all", "-j", job.job_id, "-o", "%T"]).stdout.strip()

    started_again = job.run.path / "started-again"
    wait_for(
        lambda: state() == "PENDING" or started_again.exists(),
        "the job to be back in the queue",
        every_s=COMMAND_EVERY_S,
    )
    # Slurm lets a requeued job wait for two minutes, unless it is told otherwise.
    job.cluster.run(["scontrol", "update", f"JobId={job.job_id}", "StartTime=now+3"], check=False)
    wait_for(lambda: started_again.exists() and started_again.read_text().strip(), "it to start again")
    again = started_again.read_text().strip()
    assert nodes[0] not in job.cluster.run(["scontrol", "show", "hostnames", again]).stdout.split()
    rows = job.events("deputy_acted")
    assert {row["node"] for row in rows} == {acted["node"]}, "one deputy acts"
    # It may add that Slurm refused to exclude the dead node: Slurm starts nothing on that one anyway.
    others = [row["reason"] for row in rows[1:]]
    assert all("may start on" in reason for reason in others), others
