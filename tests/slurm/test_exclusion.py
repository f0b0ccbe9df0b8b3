"""Requeue without some nodes: in the safe order, and never left held. Slurm's commands are scripts that write down
how they were called; tests/cluster has the real ones."""

from __future__ import annotations

from pathlib import Path

import pytest

from zslurm.errors import SlurmRefused
from zslurm.slurm.client import SlurmClient
from zslurm.slurm.exclusion import Size, requeue_excluding


class Calls:
    """A directory of commands that is the whole PATH."""

    def __init__(self, directory: Path, *, excluded: str, fails: str) -> None:
        self.directory = directory
        log = directory / "calls"
        self._write("squeue", f"echo '{excluded}'")
        refusal = f'case "$*" in {fails}*) echo "Invalid node name specified" >&2; exit 1;; esac'
        self._write("scontrol", f'echo "$@" >> {log}\n{refusal}')

    def _write(self, program: str, script: str) -> None:
        path = self.directory / program
        path.write_text(f"#!/bin/sh\n{script}\n")
        path.chmod(0o755)

    @property
    def made(self) -> list[str]:
        return (self.directory / "calls").read_text().splitlines()

    @property
    def client(self) -> SlurmClient:
        return SlurmClient({"PATH": str(self.directory)})


def test_hold_change_release(tmp_path: Path) -> None:
    calls = Calls(tmp_path, excluded="node[0,9]", fails="never")
    assert requeue_excluding(calls.client, "12", ["node3", "node1"]) == "node[0-1,3,9]"
    assert calls.made == ["requeuehold 12", "update JobId=12 ExcNodeList=node[0-1,3,9]", "release 12"]


def test_a_refused_change_leaves_no_held_job(tmp_path: Path) -> None:
    calls = Calls(tmp_path, excluded="(null)", fails="update")
    with pytest.raises(SlurmRefused, match="Invalid node name"):
        requeue_excluding(calls.client, "12", ["node3"])
    assert calls.made[-1] == "release 12"


def test_a_refused_requeue_changes_nothing(tmp_path: Path) -> None:
    calls = Calls(tmp_path, excluded="(null)", fails="requeuehold")
    with pytest.raises(SlurmRefused):
        requeue_excluding(calls.client, "12", ["node3"])
    assert calls.made == ["requeuehold 12"]


def test_a_job_that_fills_its_partition_shrinks_in_the_same_update(tmp_path: Path) -> None:
    calls = Calls(tmp_path, excluded="(null)", fails="never")
    requeue_excluding(calls.client, "12", ["node3"], size=Size(nodes=3, tasks_per_node=8, cpus_per_task=12))
    assert calls.made[1] == "update JobId=12 ExcNodeList=node3 NumNodes=3 NumTasks=24 NumCPUs=288"


def test_an_exclusion_that_expired_is_taken_back(tmp_path: Path) -> None:
    calls = Calls(tmp_path, excluded="node[0,9]", fails="never")
    assert requeue_excluding(calls.client, "12", ["node3"], forgiven={"node9"}) == "node[0,3]"
