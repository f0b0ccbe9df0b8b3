"""A node with ranks dies: the job comes back without it, by itself."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.on_slurm.cluster.slurm_cluster import SlurmCluster
from tests.on_slurm.cluster.user import ENDLESS, User, at_work
from zslurm.slurm.hostlist import expand

pytestmark = pytest.mark.slurm


@pytest.fixture
def user(slurm_cluster: SlurmCluster) -> Iterator[User]:
    with at_work(slurm_cluster, "dead-nodes-test") as person:
        yield person


def test_a_job_that_loses_a_node_comes_back_without_it_and_is_never_held(user: User) -> None:
    """Without GPUs the job is requeued before Slurm calls the node down, and completes on a dead node."""
    aegis = {"grace_s": 3, "recovery": "restart"}
    user.zslurm("submit", user.write_run("bereft", steps=ENDLESS, aegis=aegis, cluster={"gpus_per_node": 0}))
    user.wait_for_step("bereft", 5)
    dead = user.nodes_of("bereft")[1]
    user.cluster.kill_node(dead)
    user.wait_for_state("bereft", "requeued", "completing", "held")
    state = user.wait_for_state("bereft", "running", "held")
    assert state["state"] == "running", state["reason"]
    assert dead not in expand(state["nodes"])
    user.wait_for_step("bereft", user.stopped_at("bereft") + 2)
    (requeued,) = [event for event in user.events("bereft") if event["event"] == "requeued"]
    assert requeued["excluded"] == dead, "as Slurm shows it"
