"""Pairs of faults on a real Slurm: each ends as its worse half would alone.

`make faults` runs one of them, `make soak` all, which takes about an hour; `make soak
PYTEST_ARGS=tests/faults/test_pairs.py` runs nothing else. Every run that is more than the sample replaces the rows
of its pairs in benchmarks/results/fault_pairs.md.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.faults import checks, further
from tests.faults.conftest import Undisturbed
from tests.faults.harness import FaultRun
from tests.faults.kept_results import commit, place, today
from tests.faults.matrix import Injected, Row, by_itself
from tests.faults.nodes import FaultNodes
from tests.faults.pair_table import PairEntry, PairTable
from tests.faults.pairs import PAIRS, Expected, Pair
from tests.faults.parts import name
from tests.on_slurm.cluster.slurm_cluster import SlurmCluster
from tests.on_slurm.cluster.user import User
from tests.waiting import wait_for
from zslurm.core.errors import Exit

pytestmark = [pytest.mark.slurm, pytest.mark.timeout(900)]

_ALL = [
    pytest.param(pair, id=pair.id, marks=pytest.mark.faults if pair.sample else pytest.mark.soak) for pair in PAIRS
]


@pytest.fixture(scope="session")
def pair_table() -> Iterator[PairTable]:
    """Collects what came of each, and writes it down."""
    commit()  # before files change while the tests run
    rows = PairTable(place())
    yield rows
    rows.write()


@pytest.fixture
def with_preemption(slurm_cluster: SlurmCluster) -> Iterator[None]:
    with further.preemption(slurm_cluster):
        yield


@pytest.mark.parametrize("pair", _ALL)
def test_it_ends_as_its_worse_half_would(
    pair: Pair,
    site: tuple[User, FaultNodes],
    undisturbed: Undisturbed,
    pair_table: PairTable,
    request: pytest.FixtureRequest,
) -> None:
    user, nodes = site
    if pair.needs_preemption:
        request.getfixturevalue("with_preemption")
    curve = undisturbed.curve(user, nodes)
    run = FaultRun(user, nodes, f"pair-{PAIRS.index(pair):02d}")
    expected = Expected.of(pair)
    pair_table.failed(pair.id)  # unless it comes to its end below
    try:
        met, injected = _strike(pair, run)
        if expected.ends == "gone":
            checks.is_gone_for_good(run)
        else:
            checks.wait_until_settled(run)
        entry = _measure(pair, run, met, injected)
        _check(expected, run, injected)
        if expected.ends == "completed" and expected.same_size:
            checks.same_curve(run, curve)
        elif expected.ends == "completed":
            checks.close_curve(run, curve, undisturbed.spread())
        pair_table.passed(entry)
    except (AssertionError, TimeoutError) as error:
        raise AssertionError(f"{error}\n{run.story()}") from error
    finally:
        run.cleanup()


def _strike(pair: Pair, run: FaultRun) -> tuple[str, tuple[Injected, Injected]]:
    """Submit the run and do both; returns also the run's last event before the second."""
    for row in pair.rows:
        if row.small_disk_mb is not None:
            run.put_checkpoints_on_small_disk(row.small_disk_mb)
    submission = pair.submission()
    for row in pair.rows:
        if row.partition is not None:
            submission["slurm"]["partition"] = run.make_partition(row.partition)
    run.submit(**submission)
    wait_for(lambda: len(run.supervisors()) == 1, f"a supervisor of {run.name}")  # those are found that live
    first = _inject(pair.first, run)
    run.struck = True
    pair.when.wait(run, first.time)
    met = name(run.events()[-1])
    second = _inject(pair.second, run)
    if pair.heal is not None:
        pair.healed_when.wait(run, second.time)
        pair.heal(run)
    return met, (first, second)


def _inject(row: Row, run: FaultRun) -> Injected:
    if row.inject is by_itself:  # of two that happen inside the ranks, this one
        return Injected(run.wait_for_mark(what=row.in_ranks[0]["what"]))
    return row.inject(run)


def _check(expected: Expected, run: FaultRun, injected: tuple[Injected, Injected]) -> None:
    if expected.ends != "gone":
        state = run.wait_until_idle()
        outcome = "failed" if expected.ends == "stopped" else "completed"
        assert state["state"] == outcome, state
        if expected.ends == "stopped":
            assert state["exit_code"] == Exit.STOPPED
            assert expected.cause in run.user.zslurm("status", run.name)
    noticed = {name(event) for event in run.events() if event["time"] >= injected[0].time}
    assert not expected.kinds or noticed & expected.kinds, f"noticed: {sorted(noticed)}"
    taken = set(checks.actions(run, on_faults=True))
    assert taken <= expected.actions, f"decided: {sorted(taken)}; only {sorted(expected.actions)} may be"
    checks.nodes_are_attributed(run, [set(half.guilty) for half in injected], expected.excludes, expected.leaves)
    checks.avoids_excluded(run)
    checks.loses_little(run, expected.intervals)
    checks.starts_as_often_as_it_must(run, expected.starts, expected.requeues)
    checks.one_acts_at_a_time(run, expected.supervisors_killed, standby=expected.standby)
    checks.nothing_is_left(run)


def _measure(pair: Pair, run: FaultRun, met: str, injected: tuple[Injected, Injected]) -> PairEntry:
    first, second = injected
    guilty = {*first.guilty, *second.guilty}
    excluded = checks.excluded(run)
    stepped = [mark["time"] for mark in run.marks("stepped") if mark["time"] > first.time]
    end = run.ended()
    return PairEntry(
        id=pair.id,
        first=pair.first.fault,
        second=pair.second.fault,
        when=pair.when.words,
        met=met,
        actions=tuple(checks.actions(run)),
        ended=end["outcome"] if end is not None else "gone",
        attempts=len(run.events("attempt_started")),
        requeues=checks.requeues(run),
        excluded=len(excluded),
        wrongly_excluded=len(excluded - guilty),
        lost_steps=tuple(checks.lost_steps(run)),
        trains_again_s=max(stepped) - first.time if stepped else None,
        date=today(),
        commit=commit(),
    )
