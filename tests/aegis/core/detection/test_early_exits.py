"""Ranks that exited with 0 too early and recorded nothing: found by what srun and their peers left."""

from __future__ import annotations

from typing import Any

import pytest

from zslurm.aegis.core.detection.early_exits import early_exits
from zslurm.aegis.types import Fault

NODES = ("node0", "node0", "node1", "node1")
FAILED = (
    "srun: error: node0: task 0: Exited with exit code 1\nsrun: error: node1: tasks 2-3: Exited with exit code 1\n"
)


def recorded(*ranks: int, code: int = 1) -> list[dict[str, Any]]:
    return [{"rank": rank, "exit_code": code, "time": 100.0 + rank, "step": 7} for rank in ranks]


def found(code: int, log: str, *ranks: int, dead: tuple[str, ...] = ()) -> list[Fault]:
    return early_exits(code, log, recorded(*ranks), NODES, dead=dead, step=7, now=200.0)


def test_the_rank_that_neither_srun_nor_a_record_speaks_of_is_the_root() -> None:
    (fault,) = found(1, FAILED, 0, 2, 3)
    assert (fault.kind, fault.role, fault.node, fault.rank, fault.step) == ("early_exit", "root", "node0", 1, 7)
    assert fault.line == "exited with exit code 0 before the end of the run"
    assert fault.time == 100.0, "before the first of its peers complained"


def test_all_of_them_may_leave() -> None:
    assert [fault.rank for fault in found(0, "")] == [0, 1, 2, 3]
    many = early_exits(0, "", [], ["node0"] * 1024, dead=(), step=None, now=200.0)
    assert [(fault.rank, fault.line) for fault in many] == [
        (None, "ranks 0-1023 exited with exit code 0 before the end of the run")
    ]


@pytest.mark.parametrize(
    ("code", "log", "ranks"),
    [
        (0, "", (0, 1, 2, 3)),
        (1, "srun: error: Unable to create step for job 7: Requested nodes are busy\n", ()),
        (137, "", ()),
        (137, f"srun: Timed out waiting for job step to complete\n{FAILED}", (0, 2, 3)),
        (1, "srun: error: Task launch for StepId=1.1 failed on node node0: Unspecified error\n" + FAILED, (2, 3)),
        (1, "srun: error: Node failure on node0\n" + FAILED, (2, 3)),
    ],
    ids=["in order", "no step", "srun was killed", "srun gave up", "not launched", "a dead node"],
)
def test_silence_proves_nothing_where_srun_did_not_report_every_task(
    code: int, log: str, ranks: tuple[int, ...]
) -> None:
    assert found(code, log, *ranks) == []


def test_ranks_of_a_node_that_the_agents_found_dead_could_record_nothing() -> None:
    assert found(1, FAILED, 2, 3, 0, dead=("node0",)) == []
