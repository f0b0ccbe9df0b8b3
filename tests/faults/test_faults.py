"""Every fault of the matrix on a real Slurm: the run continues by itself, or stops if it must.

`make test` runs one of them, `make faults` and `make soak` all.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from tests.faults import checks
from tests.faults.conftest import Undisturbed
from tests.faults.harness import FaultRun
from tests.faults.in_memory import MemoryRow
from tests.faults.matrix import ROWS, Injected, Row
from tests.faults.nodes import FaultNodes
from tests.faults.parts import name, recovery
from tests.faults.table import Entry, Table
from tests.on_slurm.cluster.user import User
from zslurm.core.errors import Exit

pytestmark = [pytest.mark.slurm, pytest.mark.timeout(2400)]

_ALL = [pytest.param(row, id=row.id, marks=() if row.sample else pytest.mark.faults) for row in ROWS]


@pytest.mark.parametrize("row", _ALL)
def test_the_run_survives(row: Row, site: tuple[User, FaultNodes], undisturbed: Undisturbed, table: Table) -> None:
    curve = undisturbed.curve(*site)
    table.failed(row)  # unless it comes to its end below
    with run_of(row, site) as run:
        injected = inject(row, run)
        if row.slurm.get("time"):
            run.lift_time_limit(injected.time)
        end = run.wait_until_over()
        entry = _measure(row, run, injected, end["outcome"])
        check(row, run, injected, end["outcome"])
        if row.ends == "completed" and row.same_size:
            checks.same_curve(run, curve)
        elif row.ends == "completed":
            checks.close_curve(run, curve, undisturbed.spread())
    table.passed(entry)


@contextmanager
def run_of(row: Row, site: tuple[User, FaultNodes]) -> Iterator[FaultRun]:
    """The run that a row's fault happens to; what fails is raised with its story, and nothing of it is left."""
    run = FaultRun(*site, f"fault-{row.number:02d}", in_memory=isinstance(row, MemoryRow))
    try:
        yield run
    except (AssertionError, TimeoutError) as error:
        raise AssertionError(f"{error}\n{run.story()}") from error
    finally:
        run.cleanup()


def inject(row: Row, run: FaultRun) -> Injected:
    """Submit the run as the row has it, and let the fault happen."""
    if row.small_disk_mb is not None:
        run.put_checkpoints_on_small_disk(row.small_disk_mb)
    slurm = dict(row.slurm)
    if row.partition is not None:
        slurm["partition"] = run.make_partition(row.partition)
    run.submit(
        in_ranks=row.in_ranks,
        pace_s=row.pace_s,
        nodes=row.nodes,
        slurm=slurm,
        aegis=row.aegis,
        checkpoint=row.checkpoint,
        integrity=row.integrity,
    )
    if run.in_memory:
        run.let_go()
    return row.inject(run)


def check(row: Row, run: FaultRun, injected: Injected, outcome: str) -> None:
    """What was noticed and done, and how it ended."""
    state = run.wait_until_idle()
    assert outcome == ("completed" if row.ends == "completed" else "failed"), state
    noticed = {name(event) for event in run.events() if event["time"] >= injected.time}
    assert not row.kinds or noticed & set(row.kinds), f"noticed: {sorted(noticed)}"
    actions = checks.actions(run, on_faults=True)
    if row.slurm.get("time"):  # a slow machine reaches its time limit before the fault
        actions = actions[sum(event["time"] < injected.time for event in run.events("decision")) :]
    assert actions == list(row.actions)
    if row.rank is not None and row.actions:
        assert run.events("decision")[0]["root"].get("rank") == row.rank
    if "rank_hang" in row.kinds:
        assert run.events("stacks_dumped"), "the stacks of the ranks are kept"
    excluded, guilty = checks.excluded(run), set(injected.guilty)
    assert excluded == guilty if row.excludes else excluded <= guilty, "a node was to blame, or was not"
    checks.avoids_excluded(run)
    checks.loses_little(run, row.intervals)
    if row.ends == "stopped":
        assert state["exit_code"] == Exit.STOPPED
        assert row.cause in run.user.zslurm("status", run.name)
    checks.nothing_is_left(run)


def _measure(row: Row, run: FaultRun, injected: Injected, outcome: str) -> Entry:
    found = recovery(run, injected.time, row.kinds)
    excluded = checks.excluded(run)
    return Entry(
        number=row.number,
        fault=row.fault,
        detected_as=found.detected_as,
        detect_s=found.detect_s,
        actions=tuple(checks.actions(run)),
        ended="stopped" if outcome == "failed" else outcome,
        excluded=tuple(sorted(excluded)),
        wrongly_excluded=tuple(sorted(excluded - set(injected.guilty))),
        lost_steps=tuple(checks.lost_steps(run)),
        parts=found.parts,
    )
