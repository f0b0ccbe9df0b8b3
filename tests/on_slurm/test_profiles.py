"""`zslurm init` and `zslurm cluster check` against a real Slurm, as an ordinary user."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.on_slurm.cluster.as_user import COMMAND_EVERY_S
from tests.on_slurm.cluster.config_files import slurm_version
from tests.on_slurm.cluster.rail_nodes import NICS, RailNodes
from tests.on_slurm.cluster.slurm_cluster import SlurmCluster
from tests.on_slurm.cluster.user import directory_of
from tests.waiting import wait_for
from zslurm.core.errors import Exit

pytestmark = pytest.mark.slurm


@pytest.fixture
def config(slurm_cluster: SlurmCluster) -> Iterator[Path]:
    """A fresh configuration directory of the ordinary user."""
    with directory_of(slurm_cluster, "profiles-test") as directory:
        yield directory


def run(cluster: SlurmCluster, config: Path, *arguments: str, **environment: str) -> tuple[int, str, list[str]]:
    """A command's code, output, and lines of messages."""
    env = {"XDG_CONFIG_HOME": str(config), **environment}
    done = cluster.zslurm(*arguments, env=env, check=False)
    return done.returncode, done.stdout, done.stderr.splitlines()


def write(cluster: SlurmCluster, config: Path, text: str) -> None:
    """The profile `lab`, written by its user."""
    cluster.run(["mkdir", "-p", config / "zslurm" / "clusters"])
    cluster.run(["tee", config / "zslurm" / "clusters" / "lab.yaml"], input=text)


def faults(cluster: SlurmCluster, config: Path, text: str) -> list[str]:
    write(cluster, config, text)
    code, _, lines = run(cluster, config, "cluster", "check", "lab")
    assert code == Exit.CHECK_FAILED, lines
    return [line.removeprefix("zslurm: lab: ") for line in lines if line.startswith("zslurm: ")]


def test_init_writes_what_slurm_says(slurm_cluster: SlurmCluster, config: Path) -> None:
    code, text, messages = run(slurm_cluster, config, "init", "--yes", "--name", "lab")
    assert code == 0, messages
    lines = text.splitlines()
    version = slurm_version()
    assert (
        lines[0] == f"# Cluster profile of zslurm, written by `zslurm init` from Slurm {version}. Edit it freely."
    )
    assert lines[1] == (
        "# Partition batch: 8 nodes, 8 of them like this one; time limit 1 day, 0:00:00, "
        "0:10:00 if a job names none."
    )
    assert "# No accounting: what becomes of a job is known as long as the controller remembers it." in lines
    assert "# KillWait: 10 s from SIGTERM to SIGKILL." in lines
    is_old = any(line.startswith(f"# Slurm {version} is older than 23.02.0: ") for line in lines)
    assert is_old == (version < (23, 2, 0))
    assert "  lost_peer_s: 59         # by then Slurm has named a dead node (SlurmdTimeout is 10 s)" in lines
    shown = json.loads(run(slurm_cluster, config, "cluster", "show", "--json")[1])
    assert shown["aegis.lost_peer_s"]["value"] == 59
    code, out, messages = run(slurm_cluster, config, "cluster", "check")
    assert (code, messages) == (0, [])
    assert out.splitlines() == [
        "ok: it is valid",
        "ok: partition batch is up",
        "ok: 8 nodes with 8 GPUs of type mi300x",
        "ok: sbatch accepts a job of this profile",
    ]


def test_a_probe_reads_a_node_and_chooses_what_to_extend(slurm_cluster: SlurmCluster, config: Path) -> None:
    nodes = RailNodes(slurm_cluster, config / "nodes")
    code, text, messages = run(
        slurm_cluster, config, "init", "--probe", "--yes", "--name", "lab", ZSLURM_SYSROOT=nodes.sysroot
    )
    assert code == 0, messages
    lines = text.splitlines()
    assert any(
        line.startswith("# Probed node") and line.endswith(": 8 x AMD Instinct MI300X OAM.") for line in lines
    )
    assert "  extends: mi300x-pollara" in lines
    assert f"  nics: [{', '.join(NICS)}]   # in rail order" in lines
    given = run(slurm_cluster, config, "cluster", "env")[1].splitlines()
    assert f"export NCCL_IB_HCA='={','.join(NICS)}'" in given
    assert "export NCCL_PXN_DISABLE=0" in given
    assert run(slurm_cluster, config, "cluster", "check")[0] == 0


def test_a_probe_that_cannot_run_leaves_the_profile_as_it_was(slurm_cluster: SlurmCluster, config: Path) -> None:
    write(slurm_cluster, config, "# mine\n")
    slurm_cluster.run_as_root(["scontrol", "update", "NodeName=ALL", "State=DRAIN", "Reason=test"])
    code, out, messages = run(
        slurm_cluster, config, "init", "--probe", "--probe-timeout", "3", "--yes", "--name", "lab"
    )
    assert code == Exit.FAILED
    assert out == ""
    assert messages[-1] == "zslurm: none of node[0-7] is up"
    assert (config / "zslurm" / "clusters" / "lab.yaml").read_text() == "# mine\n"


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        ("slurm: {partition: bacth}\n", "slurm.partition: Slurm has no partition bacth; did you mean `batch`?"),
        ("slurm: {partition: gpu}\n", "slurm.partition: Slurm has no partition gpu; partitions: batch"),
        (
            "cluster: {gpus_per_node: 8, gpu_type: h100}\n",
            "cluster.gpu_type: no node of batch has 8 GPUs of type h100; "
            "there are 8 nodes with 8 GPUs of type mi300x",
        ),
        (
            "cluster: {gpus_per_node: 16, gpu_type: mi300x}\n",
            "cluster.gpus_per_node: no node of batch has 16 GPUs of type mi300x; "
            "there are 8 nodes with 8 GPUs of type mi300x",
        ),
        ("cluster: {cpus_per_node: 96}\n", "cluster.cpus_per_node: 96, but the nodes have 32"),
    ],
)
def test_each_fault_is_found_before_a_job_is(
    slurm_cluster: SlurmCluster, config: Path, text: str, fault: str
) -> None:
    assert faults(slurm_cluster, config, text) == [fault]


def test_slurms_own_refusal_is_passed_on(slurm_cluster: SlurmCluster, config: Path) -> None:
    for slurm in ("{constraint: nosuchfeature}", "{nodes: 9}", "{time: 2-00:00:00, flags: {reservation: none}}"):
        (line,) = faults(slurm_cluster, config, f"slurm: {slurm}\n")
        assert line.startswith("sbatch refuses a job of this profile: ")
    assert not slurm_cluster.run(["squeue", "--noheader"]).stdout, "nothing is submitted"


def test_a_partition_that_is_down_and_drained_nodes(slurm_cluster: SlurmCluster, config: Path) -> None:
    write(slurm_cluster, config, "cluster: {gpus_per_node: 8}\n")
    slurm_cluster.run_as_root(["scontrol", "update", "NodeName=ALL", "State=DRAIN", "Reason=new cables"])
    code, _, messages = run(slurm_cluster, config, "cluster", "check", "lab")
    unusable = "none of the 8 nodes can be used now (new cables); sbatch was not asked"
    assert (code, messages) == (0, [f"note: {unusable}"])
    try:
        slurm_cluster.run_as_root(["scontrol", "update", "PartitionName=batch", "State=DOWN"])
        assert faults(slurm_cluster, config, "cluster: {gpus_per_node: 8}\n") == [
            "slurm.partition: batch is not up"
        ]
    finally:
        slurm_cluster.run_as_root(["scontrol", "update", "PartitionName=batch", "State=UP"])


@pytest.fixture
def enforcing(slurm_cluster_with_accounting: SlurmCluster) -> Iterator[SlurmCluster]:
    """A cluster on which only users with an account may submit, and ours has none."""
    cluster = slurm_cluster_with_accounting
    before = cluster.slurm_conf.read_text()
    for text in (before + "AccountingStorageEnforce=associations,qos\n", before):
        cluster.stop_controller()
        cluster.slurm_conf.write_text(text)
        cluster.start_controller()
        wait_for(
            lambda: set(cluster.node_states().values()) == {"idle"},
            "every node to be idle",
            every_s=COMMAND_EVERY_S,
        )
        if text != before:
            yield cluster


def test_an_account_that_is_not_allowed_is_refused(enforcing: SlurmCluster) -> None:
    config = enforcing.user_dir("profiles-test")
    (line,) = faults(enforcing, config, "slurm: {account: theirs}\n")
    assert line.startswith("sbatch refuses a job of this profile: ")
    assert "Invalid account" in line
    code, text, _ = run(enforcing, config, "init", "--yes")
    assert code == 0
    assert "# Accounting: yes; " in text
    shutil.rmtree(config)
