"""What Slurm's configuration means for a run, and what `init` writes of it."""

from __future__ import annotations

from datetime import timedelta

import pytest

from tests.cluster.recorded_config import FULL_CONFIG
from tests.slurm.recordings import recorded
from zslurm.cluster.profile_writer import Members, slurm_profile
from zslurm.config import yaml12
from zslurm.config.aegis import AegisSection
from zslurm.slurm.hostlist import expand
from zslurm.slurm.inventory import SlurmPartition, parse_config, parse_nodes, parse_partitions
from zslurm.slurm.settings import SlurmSettings, read_settings
from zslurm.slurm.topology import SlurmTopology, usual_leaf_size

BATCH = SlurmPartition("batch", "node[0-3]", 4, True, True, timedelta(days=1), timedelta(minutes=10), 3)
MEMBERS = Members(4, 4, 8, "mi300x", 32)


def settings(**config: str) -> SlurmSettings:
    return read_settings(parse_config(FULL_CONFIG) | config)


def profile(
    found: SlurmSettings, kind: str = "", switches: dict[str, str] | None = None, members: Members = MEMBERS
) -> str:
    topology = SlurmTopology(kind, {leaf: expand(nodes) for leaf, nodes in (switches or {}).items()})
    return slurm_profile("lab", BATCH, members, found, topology, None, None)


def test_a_recorded_configuration() -> None:
    found = settings()
    assert found.version == (22, 5, 8)
    assert (found.accounting, found.requeues) == (False, True)
    assert (found.preempt_mode, found.preempt_signal) == ("OFF", False)
    assert (found.kill_wait_s, found.slurmd_timeout_s, found.message_timeout_s) == (5, 10, 5)


@pytest.mark.parametrize(
    ("slurmd_timeout", "message_timeout", "patience"),
    [("300 sec", "10 sec", 460), ("10 sec", "5 sec", 59), ("600 sec", "60 sec", 1010), ("0 sec", "10 sec", None)],
)
def test_the_patience_with_lost_peers_outlasts_slurms_own(
    slurmd_timeout: str, message_timeout: str, patience: int | None
) -> None:
    found = settings(SlurmdTimeout=slurmd_timeout, MessageTimeout=message_timeout)
    assert found.lost_peer_s == patience
    if patience is not None:
        assert patience > int(slurmd_timeout.split()[0])
        assert AegisSection.model_validate(yaml12.parse(profile(found), "p").data["aegis"]).lost_peer_s == patience
    else:
        assert "aegis:" not in profile(found)
        assert "SlurmdTimeout=0: Slurm never calls a silent node dead" in profile(found)


@pytest.mark.parametrize(
    ("config", "note"),
    [
        ({"AccountingStorageType": "accounting_storage/slurmdbd"}, "Accounting: yes"),
        ({"AccountingStorageType": "accounting_storage/none"}, "No accounting"),
        ({"AccountingStorageType": "(null)"}, "No accounting"),
        ({"JobRequeue": "0"}, "JobRequeue=0"),
        ({"PreemptMode": "REQUEUE"}, "Jobs can be preempted (PreemptMode=REQUEUE); Slurm does not send"),
        (
            {"PreemptMode": "GANG,SUSPEND", "PreemptParameters": "send_user_signal,youngest_first"},
            "Jobs can be preempted (PreemptMode=GANG,SUSPEND); a job is sent its signal first and saves.",
        ),
        (
            {"PreemptMode": "REQUEUE", "SlurmctldParameters": "cloud_dns,preempt_send_user_signal"},
            "Jobs can be preempted (PreemptMode=REQUEUE); a job is sent its signal first and saves.",
        ),
        ({"KillWait": "120 sec"}, "KillWait: 120 s"),
        ({"SLURM_VERSION": "20.02.7"}, "Slurm 20.02.7 is older than 20.11.0, the oldest whose output"),
        ({"SLURM_VERSION": "21.08.8"}, "Slurm 21.08.8 is older than 22.05.0: spare nodes and agents"),
        ({"SLURM_VERSION": "22.05.8"}, "Slurm 22.05.8 is older than 23.02.0: a job does not know its end"),
    ],
)
def test_what_matters_is_noted(config: dict[str, str], note: str) -> None:
    """The forms are those of slurm.conf(5) as `scontrol show config` prints them."""
    assert any(line.startswith(note) for line in settings(**config).notes())


def test_what_does_not_matter_is_not_noted() -> None:
    notes = " ".join(settings(SLURM_VERSION="24.11.5").notes())
    assert "older" not in notes
    assert "preempted" not in notes
    assert "JobRequeue" not in notes
    assert read_settings({}).version is None


def test_limits_and_leaf_switches_are_comments() -> None:
    text = profile(settings(), "tree", {"leaf0": "node[0-1]", "leaf1": "node[2-3]"})
    lines = text.splitlines()
    assert lines[1] == (
        "# Partition batch: 4 nodes, 4 of them like this one; time limit 1 day, 0:00:00, "
        "0:10:00 if a job names none, at most 3 nodes for a job."
    )
    assert "# Topology: tree, 2 leaf switches:" in lines
    assert "#   leaf1: node[2-3]" in lines
    assert yaml12.parse(text, "p").data["cluster"]["nodes_per_switch"] == 2
    blocks = profile(settings(), "block", {"b0": "node[0-1]", "b1": "node[2-3]"})
    assert "nodes_per_switch" not in blocks
    assert "# Topology: block, 2 groups of nodes:" in blocks.splitlines()
    many = profile(settings(), "tree", {f"leaf{i}": f"n{i}" for i in range(20)})
    assert "#   and 4 more (scontrol show topology)" in many.splitlines()


@pytest.mark.parametrize(
    ("sizes", "usual"), [([], None), ([3], 3), ([18, 16, 18], 18), ([16, 18], 16), ([1, 32, 32], 32)]
)
def test_nodes_of_most_leaf_switches(sizes: list[int], usual: int | None) -> None:
    assert usual_leaf_size({f"leaf{i}": [f"n{j}" for j in range(size)] for i, size in enumerate(sizes)}) == usual


def test_the_account_is_written_where_it_is_given() -> None:
    text = slurm_profile("lab", BATCH, MEMBERS, settings(), SlurmTopology(), "010", None)
    assert yaml12.parse(text, "p").data["slurm"] == {"partition": "batch", "account": "010"}
    assert "  # account: my-account" in profile(settings()).splitlines()


def test_the_members_are_what_most_nodes_are() -> None:
    assert Members.of(BATCH, parse_nodes(recorded.SINFO)) == Members(4, 4, 8, "mi300x", 32)
    assert Members.of(BATCH, []) == Members(0, 0, 0, None, 1)


def test_a_partition_whose_nodes_are_hidden_is_described_by_what_slurm_shows_of_it() -> None:
    """With PrivateData=nodes sinfo is refused. The partition shows GPUs if the site accounts for them."""
    counted = (
        "PartitionName=batch Nodes=node[0-1] State=UP TotalCPUs=64 TotalNodes=2 TRES=cpu=64,node=2,gres/gpu=16"
    )
    (partition,) = parse_partitions(counted)
    assert Members.of_hidden(partition) == Members(2, 2, 8, None, 32, hidden=True)
    (partition,) = parse_partitions(counted.replace(",gres/gpu=16", ""))
    lines = profile(settings(), members=Members.of_hidden(partition)).splitlines()
    assert "2 nodes, which the site does not show to users (PrivateData=nodes); " in lines[1]
    assert "  cpus_per_node: 32" in lines
    assert any(line.startswith("  # gpus_per_node: 8") for line in lines), "never 0, which would ask for none"
