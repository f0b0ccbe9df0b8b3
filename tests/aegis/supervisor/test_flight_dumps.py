"""Dumps of flight recorders in an attempt's directory: which are read, and what faults they lead to."""

from __future__ import annotations

import os
import pickle
from pathlib import Path

import pytest

from tests.aegis.core.detection.test_flight_records import WORLD, Recorders
from zslurm.aegis.supervisor.flight_dumps import described, examine, hangs
from zslurm.run.run_dir import AttemptDir, RunDir

NODES = ["n0", "n0", "n1", "n1"]


@pytest.fixture
def attempt(tmp_path: Path) -> AttemptDir:
    made = RunDir(tmp_path).attempt(1)
    made.flight.mkdir(parents=True)
    return made


def _dump(attempt: AttemptDir, *ranks: int) -> None:
    recorders = Recorders()
    recorders.call(WORLD, 5, [0, 2, 3])
    for rank in ranks:
        attempt.flight_dump(rank).write_bytes(pickle.dumps(recorders.dump(rank), 2))


def test_the_rank_that_the_others_wait_for_is_a_fault(attempt: AttemptDir) -> None:
    _dump(attempt, 0, 1, 2, 3)
    culprits, dumps = examine(attempt, NODES)
    assert dumps == 4
    (fault,) = hangs(culprits, NODES)
    assert (fault.kind, fault.rank, fault.node, fault.source) == ("rank_hang", 1, "n0", "flight_recorder")
    assert fault.time == 1.0, "when the others called the operation"
    assert fault.line == "rank 1 did not call all_reduce 5 of group 0, in which other ranks wait"
    assert described(culprits) == ["1 rank (1) did not call all_reduce 5 of group 0, in which other ranks wait"]


def test_without_dumps_no_rank_is_named(attempt: AttemptDir) -> None:
    assert examine(attempt, NODES) == ([], 0)


def test_a_damaged_dump_and_one_that_others_may_write_name_no_rank(attempt: AttemptDir) -> None:
    _dump(attempt, 0, 2, 3)
    attempt.flight_dump(1).write_bytes(b"\x80\x02}(X\x07")
    assert examine(attempt, NODES) == ([], 3), "a rank that has begun to write its dump is not missing"
    _dump(attempt, 1)
    attempt.flight_dump(1).chmod(0o666)
    assert examine(attempt, NODES) == ([], 3)


def test_a_dump_that_runs_code_does_not(attempt: AttemptDir, tmp_path: Path) -> None:
    class Trap:
        def __reduce__(self) -> tuple[object, ...]:
            return os.mkdir, (str(tmp_path / "trapped"),)

    _dump(attempt, 0, 2, 3)
    attempt.flight_dump(1).write_bytes(pickle.dumps({"pg_config": {}, "entries": [Trap()]}))
    examine(attempt, NODES)
    assert not (tmp_path / "trapped").exists()
