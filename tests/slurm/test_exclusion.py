"""Requeue without some nodes: in the safe order, done once, and never left held."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.slurm.recordings.scripts import Calls
from zslurm.core.errors import SlurmRefused, SlurmUnavailable
from zslurm.slurm.exclusion import Size, exclude_requeued, requeue_excluding, requeue_unchanged


def test_hold_change_release(tmp_path: Path) -> None:
    calls = Calls(tmp_path, excluded="node[0,9]")
    assert requeue_excluding(calls.client, "12", ["node3", "node1"]) == "node[0-1,3,9]"
    assert calls.made == ["requeuehold 12", "update JobId=12 ExcNodeList=node[0-1,3,9]", "release 12"]


def test_a_refused_change_leaves_no_held_job(tmp_path: Path) -> None:
    calls = Calls(tmp_path, refuses="update")
    with pytest.raises(SlurmRefused, match="Invalid node name"):
        requeue_excluding(calls.client, "12", ["node3"])
    assert calls.made[-1] == "release 12"


def test_a_refused_requeue_changes_nothing(tmp_path: Path) -> None:
    calls = Calls(tmp_path, refuses="requeuehold")
    with pytest.raises(SlurmRefused):
        requeue_excluding(calls.client, "12", ["node3"])
    assert calls.made == ["requeuehold 12"]


def test_a_job_that_fills_its_partition_shrinks_in_the_same_update(tmp_path: Path) -> None:
    calls = Calls(tmp_path)
    requeue_excluding(calls.client, "12", ["node3"], size=Size(nodes=3, tasks_per_node=8, cpus_per_task=12))
    assert calls.made[1] == "update JobId=12 ExcNodeList=node3 NumNodes=3 NumTasks=24 NumCPUs=288"


def test_an_exclusion_that_expired_is_taken_back(tmp_path: Path) -> None:
    calls = Calls(tmp_path, excluded="node[0,9]")
    assert requeue_excluding(calls.client, "12", ["node3"], expired={"node9"}) == "node[0,3]"


def test_a_requeue_that_was_done_though_slurm_did_not_answer_is_not_repeated(tmp_path: Path) -> None:
    calls = Calls(tmp_path, misses="requeuehold")
    assert requeue_excluding(calls.client, "12", ["node3"]) == "node3"
    assert calls.made == ["requeuehold 12", "update JobId=12 ExcNodeList=node3", "release 12"]


def test_a_plain_requeue_that_was_done_though_slurm_did_not_answer_is_fine(tmp_path: Path) -> None:
    calls = Calls(tmp_path, misses="requeue")
    requeue_unchanged(calls.client, "12")
    requeue_unchanged(calls.client, "12")
    assert calls.made == ["requeue 12", "requeue 12"], "the second is refused, and that is fine"


def test_a_requeue_that_slurm_did_not_hear_of_is_for_the_caller_to_repeat(tmp_path: Path) -> None:
    calls = Calls(tmp_path, misses="requeuehold", deaf=True)
    with pytest.raises(SlurmUnavailable, match="it may have been done"):
        requeue_excluding(calls.client, "12", ["node3"])
    assert calls.made == ["requeuehold 12"]
    assert requeue_excluding(calls.client, "12", ["node3"]) == "node3"


def test_a_job_that_left_already_is_only_changed(tmp_path: Path) -> None:
    calls = Calls(tmp_path, excluded="node9")
    assert exclude_requeued(calls.client, "12", ["node3"]) == "node[3,9]"
    assert calls.made == ["hold 12", "update JobId=12 ExcNodeList=node[3,9]", "release 12"]
