"""Requeue without some nodes: done once, never held, and known to be done by what Slurm shows afterwards."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.slurm.recordings.scripts import Calls
from zslurm.core.errors import SlurmRefused, SlurmUnavailable
from zslurm.slurm.exclusion import (
    JobSize,
    RequeueResult,
    exclude_requeued,
    requeue_excluding,
    requeue_unchanged,
    wait_until_down,
)


def test_requeue_and_change(tmp_path: Path) -> None:
    calls = Calls(tmp_path, excluded="node[0,9]")
    assert requeue_excluding(calls.client, "12", ["node3", "node1"], restarts=0) == RequeueResult("node[0-1,3,9]")
    assert calls.made == ["requeue 12", "update JobId=12 ExcNodeList=node[0-1,3,9]"]


def test_a_refused_change_leaves_a_job_that_starts_again(tmp_path: Path) -> None:
    calls, slept = Calls(tmp_path, excluded="node9", refuses="update"), list[float]()
    done = requeue_excluding(calls.client, "12", ["node3"], restarts=0, sleep=slept.append)
    assert (done.excluded, "already completing" in done.problem, done.is_final) == ("", True, False)
    assert {call.split()[0] for call in calls.made} == {"requeue", "update"}, "it is never held"
    assert len(slept) > 1, "Slurm may take the change once the job has left its nodes"


@pytest.mark.parametrize(
    "refusal",
    [
        "Invalid node name specified for job 12",
        "slurm_update error: Access/permission denied",
        "Requested node configuration is not available for job 12",
        "Job violates accounting/QOS policy (job submit limit, user's size and/or time limits) for job 12",
    ],
)
def test_a_refusal_that_does_not_pass_is_not_tried_again(tmp_path: Path, refusal: str) -> None:
    calls, slept = Calls(tmp_path, refuses="update", refusal=refusal), list[float]()
    done = requeue_excluding(calls.client, "12", ["node3"], restarts=0, sleep=slept.append)
    assert (refusal in done.problem, done.is_final, slept) == (True, True, [])
    assert len(calls.made) == 2


@pytest.mark.parametrize(("restarts", "requeued"), [(0, True), (1, False)])
def test_a_job_that_completes_is_requeued_if_slurm_counted_it(
    tmp_path: Path, restarts: int, requeued: bool
) -> None:
    """One that was cancelled while the controller did not answer completes with the count that it had."""
    calls = Calls(tmp_path, misses="requeue", deaf=True)
    (tmp_path / "state").write_text("COMPLETING\n")
    if requeued:
        requeue_unchanged(calls.client, "12", restarts)
        return
    with pytest.raises(SlurmUnavailable):
        requeue_unchanged(calls.client, "12", restarts)


def test_a_change_that_slurm_does_not_show_afterwards_was_not_made(tmp_path: Path) -> None:
    """While a job with a dead node completes, scontrol ends with 0 and has done nothing."""
    calls = Calls(tmp_path, ignores="update")
    done = requeue_excluding(calls.client, "12", ["node3"], restarts=0, sleep=lambda _: None)
    assert done.problem == "Slurm does not show node3 as excluded, though scontrol update said nothing"


def test_a_refused_requeue_changes_nothing(tmp_path: Path) -> None:
    calls = Calls(tmp_path, refuses="requeue")
    with pytest.raises(SlurmRefused):
        requeue_excluding(calls.client, "12", ["node3"], restarts=0)
    assert calls.made == ["requeue 12"]


def test_a_job_that_fills_its_partition_shrinks_in_the_same_update(tmp_path: Path) -> None:
    calls = Calls(tmp_path)
    requeue_excluding(
        calls.client, "12", ["node3"], restarts=0, size=JobSize(nodes=3, tasks_per_node=8, cpus_per_task=12)
    )
    assert calls.made[1] == "update JobId=12 ExcNodeList=node3 NumNodes=3 NumTasks=24 NumCPUs=288"


def test_an_exclusion_that_expired_is_taken_back(tmp_path: Path) -> None:
    calls = Calls(tmp_path, excluded="node[0,9]")
    assert requeue_excluding(calls.client, "12", ["node3"], restarts=0, expired={"node9"}) == RequeueResult(
        "node[0,3]"
    )


def test_a_requeue_that_was_done_though_slurm_did_not_answer_is_not_repeated(tmp_path: Path) -> None:
    calls = Calls(tmp_path, misses="requeue")
    assert requeue_excluding(calls.client, "12", ["node3"], restarts=0) == RequeueResult("node3")
    assert calls.made == ["requeue 12", "update JobId=12 ExcNodeList=node3"]


def test_a_plain_requeue_that_was_done_though_slurm_did_not_answer_is_fine(tmp_path: Path) -> None:
    calls = Calls(tmp_path, misses="requeue")
    requeue_unchanged(calls.client, "12", 0)
    requeue_unchanged(calls.client, "12", 0)
    assert calls.made == ["requeue 12", "requeue 12"], "the second is refused, and that is fine"


def test_a_requeue_that_slurm_did_not_hear_of_is_for_the_caller_to_repeat(tmp_path: Path) -> None:
    calls = Calls(tmp_path, misses="requeue", deaf=True)
    with pytest.raises(SlurmUnavailable, match="it may have been done"):
        requeue_excluding(calls.client, "12", ["node3"], restarts=0)
    assert calls.made == ["requeue 12"]
    assert requeue_excluding(calls.client, "12", ["node3"], restarts=0) == RequeueResult("node3")


def test_a_job_that_left_already_is_only_changed(tmp_path: Path) -> None:
    calls = Calls(tmp_path, excluded="node9")
    assert exclude_requeued(calls.client, "12", ["node3"]) == RequeueResult("node[3,9]")
    assert calls.made == ["update JobId=12 ExcNodeList=node[3,9]"]


def test_a_site_that_hides_its_nodes_is_asked_about_them_once(tmp_path: Path) -> None:
    calls, slept = Calls(tmp_path, hides_nodes=True), list[float]()
    assert wait_until_down(calls.client, ["node3"], sleep=slept.append) == set()
    assert sum(slept) >= 300, "a dead node is waited for as long as Slurm takes to notice"
    assert len(calls.asked("sinfo")) == 1
