"""Every fault of the matrix, and some more, in a run that recovers in memory: the rungs of the ladder it takes.

Whatever the rung, the losses are those of a run to which nothing happens, bit for bit, wherever the number of
ranks is the same. `make faults` and `make soak` run all of them, `make test` one: they need the trainer itself.
"""

from __future__ import annotations

import pytest

from tests.faults import checks
from tests.faults.conftest import UndisturbedRanks
from tests.faults.harness import FaultRun
from tests.faults.in_memory import MEMORY_ROWS, MemoryRow
from tests.faults.matrix import Injected
from tests.faults.nodes import FaultNodes
from tests.faults.parts import in_memory, recovery
from tests.faults.table import MemoryEntry, Table
from tests.faults.test_faults import check, inject, run_of
from tests.on_slurm.cluster.user import User

pytestmark = [pytest.mark.slurm, pytest.mark.timeout(2400)]

_ALL = [pytest.param(row, id=row.id, marks=() if row.sample else pytest.mark.faults) for row in MEMORY_ROWS]


@pytest.mark.parametrize("row", _ALL)
def test_the_run_survives_in_memory(
    row: MemoryRow, site: tuple[User, FaultNodes], undisturbed_ranks: UndisturbedRanks, table: Table
) -> None:
    table.failed(row)  # unless it comes to its end below
    with run_of(row, site) as run:
        injected = inject(row, run)
        if row.after is not None:
            run.wait_until_recovered()
            row.after(run)
        if row.slurm.get("time"):
            run.lift_time_limit(injected.time)
        end = run.wait_until_over()
        entry = _measure(row, run, injected, end["outcome"])
        check(row, run, injected, end["outcome"])
        _took_the_rungs(row, run)
        if row.ends == "completed":
            curve = undisturbed_ranks.curve(run, row.ranks)
            if row.same_size:
                checks.same_curve(run, curve)
            else:
                checks.close_curve(run, curve, undisturbed_ranks.spread(row.ranks))
    table.passed(entry)


def _took_the_rungs(row: MemoryRow, run: FaultRun) -> None:
    """Which ranks were replaced in memory, and why a rung was left; what was decided then is checked elsewhere."""
    assert tuple(tuple(event["ranks"]) for event in run.recoveries()) == row.recovered
    reasons = [event["reason"] for event in run.events("recovery_failed")]
    if row.why:
        assert any(row.why in reason for reason in reasons), reasons
    elif row.recovered:
        assert not reasons
    if row.recovered and not row.actions:
        assert len(run.events("attempt_started")) == 1


def _measure(row: MemoryRow, run: FaultRun, injected: Injected, outcome: str) -> MemoryEntry:
    noticed, found = recovery(run, injected.time, row.kinds), in_memory(run, injected.time)
    excluded = checks.excluded(run)
    return MemoryEntry(
        number=row.number,
        fault=row.fault,
        detected_as=noticed.detected_as,
        detect_s=noticed.detect_s,
        rungs=(*("memory" for _ in run.recoveries()), *checks.actions(run)),
        replaced=tuple(rank for event in run.recoveries() for rank in event["ranks"]),
        why=next((event["reason"] for event in run.events("recovery_failed")), ""),
        ended="stopped" if outcome == "failed" else outcome,
        wrongly_excluded=tuple(sorted(excluded - set(injected.guilty))),
        lost_steps=(*(found.rolled_back if found else ()), *checks.lost_steps(run)),
        found=found,
    )
