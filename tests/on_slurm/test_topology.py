"""Ranks in the order of leaf switches, on a real Slurm with topology/tree and on one without."""

from __future__ import annotations

import json
from collections.abc import Iterator

import pytest

from tests.on_slurm.cluster.fixtures import running
from tests.on_slurm.cluster.slurm_cluster import SlurmCluster
from tests.on_slurm.cluster.user import User, add_to_profile, at_work
from zslurm.slurm.client import SlurmClient
from zslurm.slurm.hostlist import expand

pytestmark = pytest.mark.slurm

FEW = 2


@pytest.fixture(scope="module")
def tree_cluster(slurm_possible: None) -> Iterator[SlurmCluster]:
    """Four nodes on two leaves, even and odd."""
    yield from running(nodes=4, leaf_switches={"even": "node[0,2]", "odd": "node[1,3]"})


@pytest.fixture
def on_tree(tree_cluster: SlurmCluster) -> Iterator[User]:
    with at_work(tree_cluster, "topology-test") as person:
        yield person


@pytest.fixture
def on_flat(slurm_cluster: SlurmCluster) -> Iterator[User]:
    with at_work(slurm_cluster, "topology-test") as person:
        yield person


def nodes_of_ranks(user: User, run: str) -> list[str]:
    """The node on which each rank ran, by the ranks' own word."""
    ends = sorted((user.directory / "runs" / run / "attempts/000001/ranks").glob("*.json"))
    return [json.loads(path.read_text())["node"] for path in ends]


def run_and_check(user: User, name: str, order: list[str], *, per_node: int = 1, **cluster: object) -> None:
    run_file = user.write_run(name, steps=FEW, nodes=len(order), ranks_per_node=per_node, cluster=cluster)
    user.zslurm("submit", run_file)
    state = user.wait_for_state(name, "completed", "failed")
    assert state["state"] == "completed", user.zslurm("logs", name, "--supervisor")
    assert nodes_of_ranks(user, name) == [node for node in order for _ in range(per_node)]
    (event,) = [event for event in user.events(name) if event["event"] == "attempt_started"]
    assert expand(event["nodes"]) == order, "recorded as it is"


def test_ranks_follow_slurms_leaves(on_tree: User) -> None:
    run_and_check(on_tree, "tree", ["node0", "node2", "node1", "node3"], per_node=2)


def test_ranks_follow_the_profiles_leaves_instead(on_tree: User) -> None:
    leaves = {"b": "node[1-2]", "a": "node[0,3]"}
    run_and_check(on_tree, "profile", ["node1", "node2", "node0", "node3"], leaf_switches=leaves)


def test_slurms_leaves_are_read(on_tree: User) -> None:
    client = SlurmClient(on_tree.cluster.environment)
    assert client.topology().leaves == {"even": ["node0", "node2"], "odd": ["node1", "node3"]}


def test_without_leaves_ranks_follow_the_nodes_names_and_the_order_is_recorded(on_flat: User) -> None:
    assert SlurmClient(on_flat.cluster.environment).topology().leaves == {}
    run_and_check(on_flat, "flat", ["node0", "node1", "node2"])
    attempt = on_flat.directory / "runs/flat/attempts/000001"
    assert (attempt / "hostfile").read_text().split() == ["node0", "node1", "node2"]


def test_the_profiles_leaves_suffice_where_slurm_knows_none(on_flat: User) -> None:
    """And with GPUs, as a real job has them."""
    leaves = {"one": "node[1,3]", "two": "node[0,2,4]"}
    run_and_check(on_flat, "hinted", ["node1", "node3", "node0", "node2"], leaf_switches=leaves, gpus_per_node=8)


def describe_fabric(user: User, *groups: str) -> None:
    """Put a fabric of two rails into the profile: each group of nodes on two slices, of one uplink each."""
    slices = [
        f"      - {{leaf: leaf{leaf}, rails: [{leaf % 2}], nodes: '{nodes}'}}"
        for leaf, nodes in enumerate(nodes for nodes in groups for _ in range(2))
    ]
    fabric = ["  fabric:", "    spines: 4", "    uplinks: 1", "    slices:", *slices]
    add_to_profile(user.cluster, "".join(f"{line}\n" for line in fabric))


def directives_of(user: User, run: str) -> set[str]:
    script = (user.directory / "runs" / run / "script.sh").read_text()
    return {line.removeprefix("#SBATCH ") for line in script.splitlines() if line.startswith("#SBATCH ")}


def test_the_fabric_from_the_profile_to_the_order_of_ranks(on_tree: User) -> None:
    """Its slices are not Slurm's leaves: ranks follow the slices, and Slurm is asked for few of its leaves."""
    describe_fabric(on_tree, "node[0,3]", "node[1-2]")
    checked = on_tree.zslurm("cluster", "check")
    assert "ok: 4 nodes on 4 slices of 4 leaf switches" in checked
    order = ["node0", "node3", "node1", "node2"]
    run_file = on_tree.write_run("fabric", steps=FEW, nodes=4)
    shown = on_tree.zslurm("submit", "--dry-run", run_file)
    assert "# fabric: node[0,3],node[1-2] in the order of ranks (nodes by Slurm's estimate), in a step of" in shown
    assert "#   16 hops, oversubscription 2:1 (2 ports of a slice send up)" in shown
    on_tree.zslurm("submit", run_file)
    state = on_tree.wait_for_state("fabric", "completed", "failed")
    assert state["state"] == "completed", on_tree.zslurm("logs", "fabric", "--supervisor")
    assert nodes_of_ranks(on_tree, "fabric") == order
    assert {"--switches=2", "--exclusive"} <= directives_of(on_tree, "fabric")


def test_the_spare_is_the_node_that_shares_no_slice(on_tree: User) -> None:
    describe_fabric(on_tree, "node0", "node[1-2]")
    slurm = {"spares": 1, "nodelist": "node[0-2]"}
    run_file = on_tree.write_run("nearest", steps=FEW, slurm=slurm)
    on_tree.zslurm("submit", run_file)
    state = on_tree.wait_for_state("nearest", "completed", "failed")
    assert state["state"] == "completed", on_tree.zslurm("logs", "nearest", "--supervisor")
    assert nodes_of_ranks(on_tree, "nearest") == ["node1", "node2"]


def test_a_small_job_gets_nodes_of_one_leaf(on_tree: User) -> None:
    """`zslurm init` read the nodes of a leaf switch, and Slurm keeps what it is asked for."""
    run_file = on_tree.write_run("small", steps=FEW)
    on_tree.zslurm("submit", run_file)
    on_tree.wait_for_state("small", "completed", "failed")
    assert "--switches=1" in directives_of(on_tree, "small")
    assert sorted(nodes_of_ranks(on_tree, "small")) in (["node0", "node2"], ["node1", "node3"])
