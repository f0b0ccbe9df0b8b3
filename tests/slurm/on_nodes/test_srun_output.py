"""What srun prints about tasks that failed, line by line."""

from __future__ import annotations

import pytest

from zslurm.slurm.on_nodes.srun_output import (
    TaskFailure,
    cancelled_step,
    failed_nodes,
    launch_failures,
    task_failures,
)


def test_failures_are_read_in_the_order_of_their_report() -> None:
    text = """\
srun: error: node1: task 2: Exited with exit code 1
srun: launch/slurm: _step_signal: Terminating StepId=5.0
slurmstepd: error: *** STEP 5.0 ON node0 CANCELLED AT 2026-07-14T12:00:00 ***
srun: error: node1: task 3: Killed
srun: error: gpu-a-17: tasks 0-1,5: Segmentation fault (core dumped)
"""
    assert task_failures(text) == [
        TaskFailure("node1", (2,), "Exited with exit code 1"),
        TaskFailure("node1", (3,), "Killed"),
        TaskFailure("gpu-a-17", (0, 1, 5), "Segmentation fault (core dumped)"),
    ]


def test_only_a_rank_that_exited_by_itself_has_an_exit_code() -> None:
    codes = [
        TaskFailure("n", (0,), what).exit_code for what in ("Exited with exit code 75", "Killed", "Out Of Memory")
    ]
    assert codes == [75, None, None]


def test_a_failed_node_is_named_once() -> None:
    line = "srun: error: Node failure on node7\n"
    assert failed_nodes(line + "srun: error: Node failure on node9\n" + line) == ["node7", "node9"]
    assert failed_nodes("srun: error: node7: task 3: Killed\n") == []


def test_a_line_that_is_still_being_written_is_not_read_as_another_one() -> None:
    assert task_failures("srun: error: node1: task") == []


def test_nodes_on_which_no_task_can_be_started() -> None:
    """What srun 22.05.8 printed about eight nodes, of which one had just lost its slurmd."""
    text = (
        "srun: error: Task launch for StepId=2.0 failed on node node6: Communication connection failure\n"
        "srun: error: Application launch failed: Communication connection failure\n"
        "srun: Job step aborted\n"
    )
    assert launch_failures(text) == {"node6": "tasks cannot be started: Communication connection failure"}
    assert task_failures(text) == []


# Slurm 22.05: what srun and slurmstepd wrote of `scancel 1.2`, by a user or by root; of `scancel -s KILL 3.2`; and
# of a step of two tasks of which `kill -9` ended the second.
ABORTED = """srun: cluster configuration lacks support for cpu binding
srun: Job step aborted: Waiting up to 12 seconds for job step to finish.
srun: error: node1: task 1: Killed
"""
FORCED = """srun: error: node0: task 0: Killed
srun: error: node1: task 1: Killed
srun: Force Terminated StepId=3.2
"""
ONE_KILLED = """srun: error: node1: task 1: Killed
srun: error: node0: task 0: Exited with exit code 1
srun: Force Terminated StepId=3.0
"""
CANCELLED = (
    "step 20/60 loss 3.7\nslurmstepd-node0: error: *** STEP 1.2 ON node0 CANCELLED AT 2026-11-23T00:38:33 ***\n"
)


@pytest.mark.parametrize(
    ("text", "first_task", "step"),
    [
        (ABORTED, CANCELLED, "1.2"),
        (ABORTED, "", ""),
        (FORCED, "", None),
        (ONE_KILLED, "", None),
        (ABORTED, CANCELLED.replace(" ***\n", " DUE TO TIME LIMIT ***\n"), None),
        (ABORTED, CANCELLED.replace(" ***\n", " DUE TO PREEMPTION ***\n"), None),
        ("srun: error: Node failure on node1\n" + ABORTED, CANCELLED, None),
        ("srun: error: node1: task 1: Killed\n", "", None),
        ("srun: error: node1: task 1: Killed\n", CANCELLED, None),
    ],
    ids=[
        "scancel",
        "unnamed",
        "all killed",
        "one killed",
        "time limit",
        "preemption",
        "node failure",
        "killed",
        "only in a log",
    ],
)
def test_a_step_that_somebody_cancelled(text: str, first_task: str, step: str | None) -> None:
    assert cancelled_step(text, first_task) == step
