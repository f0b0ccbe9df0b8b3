"""Preemption, suspension, requeues and signals on a real Slurm: the run saves, and comes back where it should."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from tests.cluster.fixtures import running
from tests.cluster.slurm_cluster import SlurmCluster
from tests.cluster.user import COMMAND_EVERY_S, ENDLESS, User, at_work
from tests.waiting import wait_for

pytestmark = pytest.mark.slurm

_LOW = "Nodes=node[0-1] PriorityTier=1 OverSubscribe=NO DefaultTime=00:10:00"
PARTITIONS = f"""
PreemptType=preempt/partition_prio
PreemptMode=SUSPEND,GANG
PreemptParameters=send_user_signal
PartitionName=grace30 {_LOW} PreemptMode=REQUEUE GraceTime=30
PartitionName=grace60 {_LOW} PreemptMode=REQUEUE GraceTime=60
PartitionName=atonce {_LOW} PreemptMode=REQUEUE
PartitionName=cancel {_LOW} PreemptMode=CANCEL GraceTime=30
PartitionName=cancelatonce {_LOW} PreemptMode=CANCEL
PartitionName=gang {_LOW} PreemptMode=SUSPEND
PartitionName=urgent Nodes=node[0-1] PriorityTier=10 PreemptMode=OFF OverSubscribe=FORCE:1 DefaultTime=00:10:00
"""
SIGNALS = PARTITIONS.replace("PreemptParameters=send_user_signal\n", "")


@pytest.fixture(scope="module")
def cluster(slurm_possible: None) -> Iterator[SlurmCluster]:
    yield from running(nodes=2, settings=SIGNALS)


@pytest.fixture
def user(cluster: SlurmCluster) -> Iterator[User]:
    with at_work(cluster, "preemption-test") as person:
        yield person


def start(user: User, name: str, partition: str, *, step: int = 2, **sections: Any) -> str:
    """A run under way on both nodes; returns its job id."""
    slurm = {"partition": partition} | sections.pop("slurm", {})
    job_id = user.zslurm("submit", "-q", user.write_run(name, steps=ENDLESS, slurm=slurm, **sections))
    user.wait_for_step(name, step)
    return job_id


def urgent_job(user: User) -> str:
    """A job of higher priority that needs both nodes, for a moment."""
    return user.cluster.sbatch("sleep 1", "-N2", "--exclusive", "--partition=urgent", "--output=/dev/null")


def comes_back(user: User, name: str, job_id: str) -> None:
    """The job waits in the queue, says why, starts again, and has lost no step."""
    state = user.wait_for_state(name, "requeued", "running", "failed", "preempted", "interrupted")
    assert (state["state"], state["job_id"]) == ("requeued", job_id), state
    stopped_at = user.stopped_at(name)
    assert state["checkpoint_step"] == stopped_at
    wait_for(lambda: _starts_now(user, job_id), "the job to be let start", every_s=COMMAND_EVERY_S)
    user.wait_for_step(name, stopped_at + 2)
    second = [row["step"] for row in user.steps(name) if row["attempt"] == 2]
    assert second[0] == stopped_at + 1
    assert user.state(name)["job_id"] == job_id


def _starts_now(user: User, job_id: str) -> bool:
    """Lift the two minutes for which Slurm holds a requeued job back; earlier than this Slurm sets it anew."""
    shown = user.cluster.run(["squeue", "--noheader", "-j", job_id, "-o", "%T"]).stdout.strip()
    if shown == "PENDING":
        user.cluster.run_as_root(["scontrol", "update", f"JobId={job_id}", "StartTime=now+3"])
    return shown == "PENDING"


def events(user: User, name: str, kind: str) -> list[dict[str, Any]]:
    return [event for event in user.events(name) if event["event"] == kind]


@pytest.mark.parametrize(
    "partition", ["grace30", *(pytest.param(name, marks=pytest.mark.soak) for name in ("grace60", "atonce"))]
)
def test_a_run_that_is_preempted_saves_and_comes_back(user: User, partition: str) -> None:
    job_id = start(user, "low", partition)
    urgent = urgent_job(user)
    wait_for(lambda: events(user, "low", "preempted"), "the supervisor to know of the preemption")
    user.wait_for_state("low", "requeued", "failed")
    shown = user.zslurm("status", "low")
    assert "preempted at" in shown and "starts again by itself" in shown
    comes_back(user, "low", job_id)
    assert [event["mode"] for event in events(user, "low", "preempted")] == ["requeue"]
    assert "preempted" not in user.zslurm("status", "low").splitlines()[1]
    left = user.cluster.run(["squeue", "--noheader", "--states=all", "-j", urgent, "-o", "%T"]).stdout.strip()
    assert left == "COMPLETED"
