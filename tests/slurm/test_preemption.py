"""Whether a job is preempted, and what Slurm does with it, by what squeue and scontrol print (22.05)."""

from __future__ import annotations

from pathlib import Path

import pytest

from zslurm.slurm.client import SlurmClient
from zslurm.slurm.jobs import FIELD_END, QUEUE_FIELDS, RECORD_END
from zslurm.slurm.preemption import find_preemption

BEGAN = "2026-11-23T00:38:02"
ENDS = "2026-11-23T00:38:32"


def slurm(
    directory: Path,
    *,
    preempted: str = BEGAN,
    state: str = "RUNNING",
    restarts: int = 0,
    kind: str = "preempt/partition_prio",
    cluster_mode: str = "REQUEUE",
    partition_mode: str = "REQUEUE",
    qos: str = "low-qos",
    qos_mode: str | None = None,
) -> SlurmClient:
    """Slurm with job 7 in the partition `low`."""
    values = {
        "JobArrayID": "7", "State": state, "RestartCnt": str(restarts), "EndTime": ENDS, "Partition": "low",
    }  # fmt: skip
    record = FIELD_END.join(values.get(field, "") for field in QUEUE_FIELDS) + RECORD_END
    commands = {
        "squeue": f"""case "$*" in *PreemptTime*) echo "{preempted}";; *=QOS*) echo "{qos}";;
*) printf "%s" "{record}";; esac""",
        "scontrol": f"""case "$*" in
*partition*) echo "PartitionName=low Nodes=n1 TotalNodes=1 PreemptMode={partition_mode} State=UP";;
*config*) printf "PreemptMode             = {cluster_mode}\\nPreemptType             = {kind}\\n";; esac""",
    }
    if qos_mode is not None:
        commands["sacctmgr"] = f'case "$*" in *name={qos}*) echo "{qos_mode}";; esac'
    for program, script in commands.items():
        path = directory / program
        path.write_text(f"#!/bin/sh\n{script}\n")
        path.chmod(0o755)
    return SlurmClient({"PATH": str(directory)})


def test_a_job_that_is_not_preempted(tmp_path: Path) -> None:
    assert find_preemption(slurm(tmp_path, preempted="N/A"), "7", 0) is None


def test_the_grace_time(tmp_path: Path) -> None:
    found = find_preemption(slurm(tmp_path), "7", 0)
    assert found is not None
    assert found.ends_at is not None
    assert (found.mode, found.done, found.requeued, found.ends_at - found.time) == ("requeue", False, False, 30)


@pytest.mark.parametrize(
    ("how", "mode"),
    [
        ({"partition_mode": "CANCEL"}, "cancel"),
        ({"partition_mode": "REQUEUE", "cluster_mode": "CANCEL"}, "requeue"),
        ({"partition_mode": "", "cluster_mode": "CANCEL"}, "cancel"),
        ({"partition_mode": "REQUEUE", "cluster_mode": "GANG,SUSPEND"}, "requeue"),
        ({"kind": "preempt/qos", "qos_mode": "cancel"}, "cancel"),
        ({"kind": "preempt/qos", "qos_mode": "cluster", "cluster_mode": "CANCEL"}, "cancel"),
        ({"kind": "preempt/qos", "qos_mode": "requeue", "cluster_mode": "CANCEL"}, "requeue"),
        ({"kind": "preempt/qos", "cluster_mode": "CANCEL"}, "cancel"),
        ({"kind": "preempt/qos", "qos": "low-qos,high", "qos_mode": "cancel\ncancel"}, "cancel"),
        ({"kind": "preempt/qos", "qos": "low-qos,high", "qos_mode": "cancel\nrequeue"}, "requeue"),
        (
            {
                "kind": "preempt/qos",
                "qos": "low-qos,high",
                "qos_mode": "cluster\ncancel",
                "cluster_mode": "CANCEL",
            },
            "cancel",
        ),
        (
            {
                "kind": "preempt/qos",
                "qos": "low-qos,high",
                "qos_mode": "cluster\nrequeue",
                "cluster_mode": "CANCEL",
            },
            "requeue",
        ),
    ],
)
def test_what_slurm_will_do_is_the_mode_that_holds_for_the_job(
    tmp_path: Path, how: dict[str, str], mode: str
) -> None:
    found = find_preemption(slurm(tmp_path, **how), "7", 0)  # type: ignore[arg-type]
    assert found is not None
    assert (found.mode, found.done) == (mode, False)


@pytest.mark.parametrize(
    ("state", "restarts", "restart", "mode"),
    [
        ("COMPLETING", 1, 0, "requeue"),
        ("COMPLETING", 0, 0, "cancel"),
        ("COMPLETING", 2, 1, "requeue"),
        ("PREEMPTED", 1, 1, "cancel"),
        ("PENDING", 1, 0, "requeue"),
    ],
)
def test_what_slurm_has_done(tmp_path: Path, state: str, restarts: int, restart: int, mode: str) -> None:
    found = find_preemption(slurm(tmp_path, state=state, restarts=restarts), "7", restart)
    assert found is not None
    assert (found.mode, found.done, found.requeued) == (mode, True, mode == "requeue")
