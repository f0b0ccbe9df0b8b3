"""Ranks follow the leaves if leaves are known."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.cluster.rails.fabrics import published_form
from tests.submit.specs import run_spec
from zslurm.aegis.supervisor.node_pool import Nodes, rank_order
from zslurm.config.spec import ClusterSection
from zslurm.job.preparation.interpreter import Interpreter
from zslurm.job.step import in_order, slurm_step
from zslurm.run.run_dir import AttemptDir, RunDir
from zslurm.slurm.client import SlurmClient

NODES = ["node0", "node1", "node2", "node3"]


@pytest.fixture
def no_slurm() -> SlurmClient:
    return SlurmClient({"PATH": "/nonexistent"})


def test_the_profiles_leaves_decide_and_slurm_is_not_asked(no_slurm: SlurmClient) -> None:
    cluster = ClusterSection(leaf_switches={"b": "node[1,3]", "a": "node[0,2]"})
    assert rank_order(cluster, NODES, no_slurm) == ["node1", "node3", "node0", "node2"]


SLICES = published_form(["node[0,2]", "node[1,3-4]"])


def test_ranks_follow_the_ring_over_the_slices(no_slurm: SlurmClient) -> None:
    cluster = ClusterSection(fabric=SLICES)
    assert rank_order(cluster, NODES, no_slurm) == ["node0", "node2", "node1", "node3"]
    assert rank_order(cluster, ["node0"], no_slurm) is None
    assert rank_order(cluster, ["gpu0", "gpu1"], no_slurm) is None, "slices of other nodes"


def test_ranks_are_on_nodes_that_share_slices_and_spares_are_left_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", "/nonexistent")
    spec = run_spec(
        tmp_path,
        slurm={"nodes": 3, "spares": 2},
        cluster={"launcher": "slurm", "fabric": SLICES.model_dump()},
    )
    nodes = Nodes(spec, {"SLURM_JOB_NODELIST": "node[0-4]", "SLURM_JOB_ID": "7"})
    assert nodes.by_leaf
    assert nodes.every == ("node0", "node2", "node1", "node3", "node4")
    assert nodes.nearest(nodes.every) == ("node1", "node3", "node4")
    assert nodes.nearest(("node0", "node2", "node1")) == ("node0", "node2", "node1"), "no more than are needed"
    assert nodes.in_rank_order(("node0", "node1", "node2")) == ("node0", "node2", "node1")
    there = nodes.resources((), ("node1", "node3", "node4"), look_elsewhere=False)
    assert there.slices is not None
    assert set(there.slices) == {*nodes.every}


def test_leaves_of_other_nodes_say_nothing(no_slurm: SlurmClient) -> None:
    assert rank_order(ClusterSection(leaf_switches={"a": "gpu[0-3]"}), NODES, no_slurm) is None


def test_without_scontrol_or_neighbours_slurms_own_order_stays(no_slurm: SlurmClient) -> None:
    assert rank_order(ClusterSection(), NODES, no_slurm) is None
    assert rank_order(ClusterSection(leaf_switches={"a": "node0"}), ["node0"], no_slurm) is None


def test_the_host_file_has_a_line_for_each_rank(tmp_path: Path) -> None:
    spec = run_spec(tmp_path, slurm={"nodes": 2, "ranks_per_node": 3}, cluster={"launcher": "slurm"})
    attempt = AttemptDir(tmp_path / "000001")
    attempt.path.mkdir()
    plan = slurm_step(spec, RunDir(tmp_path), attempt, Interpreter.own({"SLURM_JOB_ID": "7"}), ["node0", "node3"])
    ordered = in_order(plan, attempt, ["node3", "node0"], 3)
    assert attempt.hostfile.read_text().split() == ["node3"] * 3 + ["node0"] * 3
    assert ordered.env == plan.env | {"SLURM_HOSTFILE": str(attempt.hostfile)}
    assert "--distribution=arbitrary" in ordered.command
    placed = ("--distribution", "--nodelist=", "--nodes=")
    assert [w for w in ordered.command if not w.startswith(placed)] == [
        w for w in plan.command if not w.startswith(placed)
    ]
    refused = ("--nodelist=", "--nodes=")  # srun of 23.11 and later: "--nodes is incompatible with ...=arbitrary"
    assert not any(w.startswith(refused) for w in ordered.command), "the file alone says where"
