"""Rails on a real Slurm whose nodes show eight GPUs and eight NICs: the survey, and the preflight of runs."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Iterator
from typing import Any

import pytest

from tests import forked
from tests.on_slurm.cluster.as_user import COMMAND_EVERY_S
from tests.on_slurm.cluster.rail_nodes import NICS, RailNodes
from tests.on_slurm.cluster.slurm_cluster import SlurmCluster
from tests.on_slurm.cluster.user import User, add_to_profile, configure, directory_of
from tests.waiting import wait_for
from zslurm.slurm.hostlist import expand

pytestmark = pytest.mark.slurm


class RailUser(User):
    """A user of a cluster whose profile knows the rails."""

    def __init__(self, cluster: SlurmCluster, directory: Any, nodes: RailNodes) -> None:
        super().__init__(cluster, directory)
        self.nodes = nodes
        configure(cluster)
        nics = json.dumps(NICS)
        add_to_profile(
            cluster, f"  network: pollara\n  nics: {nics}\n  env: {{ZSLURM_SYSROOT: '{nodes.sysroot}'}}\n"
        )

    def submit(self, name: str, *, nodes: int = 4, **cluster: Any) -> str:
        """Submit a run of a few steps on so many nodes; returns the job id."""
        run_file = self.write_run(name, steps=4, nodes=nodes, cluster=cluster)
        return self.zslurm("submit", "-q", run_file)

    def kinds(self, run: str) -> list[str]:
        """The events but for what the agents see on the nodes."""
        agents = ("agents_started", "agent_lost", "agent_restarted", "fault_detected")
        return [event["event"] for event in self.events(run) if event["event"] not in agents]

    def event(self, run: str, kind: str) -> dict[str, Any]:
        (found,) = [event for event in self.events(run) if event["event"] == kind]
        return found

    def survey(self, *options: str) -> subprocess.CompletedProcess[str]:
        """What `zslurm cluster rails` says of nodes."""
        env = self.cluster.forking(forked.OTHERS, {"ZSLURM_SYSROOT": self.nodes.sysroot})
        return self.cluster.zslurm("cluster", "rails", *options, env=env, check=False)

    def log(self, run: str) -> str:
        return self.zslurm("logs", run, "--supervisor")


@pytest.fixture
def user(slurm_cluster: SlurmCluster) -> Iterator[RailUser]:
    with (
        directory_of(slurm_cluster, "rails-test") as directory,
        directory_of(slurm_cluster, "rails-nodes") as trees,
    ):
        yield RailUser(slurm_cluster, directory, RailNodes(slurm_cluster, trees))


def test_nodes_are_surveyed_and_the_odd_one_is_named(user: RailUser) -> None:
    user.nodes["node5"].take_nic_down("ionic_6")
    whole = user.survey("--nodelist", "node[0-3]")
    assert whole.stdout.splitlines()[0] == "node[0-3]: 4 nodes, 8 rails by the profile"
    done = user.survey("--nodes", "8")
    assert done.returncode == 5
    assert done.stderr == "zslurm: rails are incomplete or unknown on node5\n"
    assert [line for line in done.stdout.splitlines() if line.startswith("node")] == [
        "node[0-4,6-7]: 7 nodes, 8 rails by the profile",
        "node5: 1 node, 8 rails by the profile",
    ]
    assert "  incomplete: rail 6: ionic_6 is DOWN (Disabled)" in done.stdout
    body = json.loads(user.survey("--nodes", "8", "--json").stdout)
    assert body["incomplete"] == ["node5"]
    assert [len(group) for group in body["groups"]] == [7, 1]


def test_a_dead_node_is_silent_not_whole(user: RailUser) -> None:
    user.cluster.run_as_root(["scontrol", "update", "NodeName=node2", "State=DRAIN", "Reason=test"])
    done = user.survey("--nodelist", "node[1-2]", "--timeout", "8")
    assert done.returncode == 1
    assert done.stderr.startswith("zslurm: the nodes could not be asked: ")
    assert "Traceback" not in done.stderr


def test_ranks_are_bound_to_the_cores_of_their_gpus_numa_node(user: RailUser) -> None:
    """By the profile: GPU 0 is on NUMA node 1 there, and that node has one of this machine's cores."""
    core = max(os.sched_getaffinity(0))
    for name in user.cluster.node_names:
        user.nodes[name].write("sys/devices/system/node/node1/cpulist", str(core))
    user.submit("bound", nodes=1, gpu_numa=[1] * 8)
    assert user.wait_for_state("bound", "completed", "failed")["state"] == "completed", user.log("bound")
    assert "bound to NUMA node 1 of its GPU: 1 core\n" in user.zslurm("logs", "bound", "--rank", "0")


def test_policy_refuse_stops_before_any_rank_and_names_node_and_nic(user: RailUser) -> None:
    user.nodes["node2"].remove_nic("ionic_3")
    job_id = user.submit("refused", rail_policy="refuse")
    state = user.wait_for_state("refused", "failed", "completed")
    assert (state["state"], state["exit_code"]) == ("failed", 93)
    assert state["cause"] == {
        "message": "node2: rail 3: ionic_3 is missing (7 RDMA devices are there)", "node": "node2",
    }  # fmt: skip
    assert not list((user.directory / "runs/refused/attempts").iterdir()), "no rank was started"
    assert "ExitCode=93:0" in user.cluster.run(["scontrol", "show", "job", job_id]).stdout
    assert "ionic_3 is missing" in user.zslurm("status", "refused")


def test_policy_exclude_requeues_without_the_node_and_completes(user: RailUser) -> None:
    """7 of 8 NICs up on one node: no rank starts there, and the run completes elsewhere by itself."""
    user.nodes["node2"].take_nic_down("ionic_6")
    job_id = user.submit("moved")
    wait_for(lambda: "requeued" in user.kinds("moved"), "the job to be requeued")
    assert "attempt_started" not in user.kinds("moved")
    _start_soon(user, job_id)
    state = user.wait_for_state("moved", "completed", "failed")
    assert state["state"] == "completed", user.log("moved")
    assert state["restarts"] == 1
    assert "node2" not in expand(state["nodes"])
    assert user.event("moved", "nodes_excluded")["nodes"] == "node2"
    assert user.event("moved", "requeued")["excluded"] == "node2"
    assert "ExcNodeList=node2" in user.cluster.run(["scontrol", "show", "job", job_id]).stdout


def _start_soon(user: RailUser, job_id: str) -> None:
    """Slurm lets a requeued job wait two minutes; a person would say `zslurm requeue --now`."""

    def waits() -> bool:
        shown = user.cluster.run(["squeue", "--noheader", "--format=%T %r", "--jobs", job_id]).stdout
        return shown.split() == ["PENDING", "BeginTime"]

    wait_for(waits, "the job to wait in the queue", every_s=COMMAND_EVERY_S)
    user.cluster.run(["scontrol", "update", f"JobId={job_id}", "StartTime=now+5"])
