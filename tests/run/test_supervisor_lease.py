"""The supervisor's lease: an agent sees whether it was replaced, and whether its supervisor lives or is gone."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from zslurm.core.processes import ProcessRecord
from zslurm.run.run_dir import RunDir
from zslurm.run.supervisor_lease import LAPSED_S, RENEW_S, Lease, LeaseWatch, read, renew, take


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    return RunDir(tmp_path)


def test_the_lease_names_the_process_and_the_generation(run: RunDir) -> None:
    take(run, "g1")
    lease = read(run)
    assert lease is not None
    assert lease.generation == "g1"
    record = ProcessRecord.read(run.supervisor)
    assert record is not None
    assert record.pid == os.getpid()


def test_only_its_holder_renews_it(run: RunDir) -> None:
    take(run, "g1")
    before = run.supervisor.stat().st_mtime_ns
    os.utime(run.supervisor, ns=(before - 10**9, before - 10**9))
    assert renew(run, "g1")
    assert run.supervisor.stat().st_mtime_ns > before - 10**9
    os.utime(run.supervisor, ns=(1, 1))
    assert not renew(run, "g2")
    assert run.supervisor.stat().st_mtime_ns == 1


@pytest.mark.parametrize("text", ["", "{", "[]", "7", '{"generation": 7}', '{"pid": 1}'])
def test_a_damaged_lease_is_nobodys(run: RunDir, text: str) -> None:
    run.supervisor.write_text(text)
    lease = read(run)
    assert lease is None or lease.generation is None
    assert not renew(run, "g1")
    watch = LeaseWatch("g1")
    watch.look(run)
    assert not watch.replaced
    assert not watch.is_renewed


def test_no_lease_is_no_replacement(run: RunDir) -> None:
    watch = LeaseWatch("g1")
    watch.look(run)
    assert not watch.replaced


def test_a_run_directory_that_is_away_says_nothing(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(OSError):
        LeaseWatch("g1").look(RunDir(tmp_path / "file"))


def test_what_an_agent_vouches_for_others_see_and_it_does_not_believe_itself(run: RunDir) -> None:
    take(run, "g1")
    body = json.loads(run.supervisor.read_text())
    os.utime(run.supervisor, ns=(1, 1))
    mine, other = LeaseWatch("g1"), LeaseWatch("g1")
    for watch in (mine, other):
        watch.look(run)
    mine.vouch(run)
    for watch in (mine, other):
        watch.look(run)
    assert (mine.is_renewed, other.is_renewed) == (False, True)
    os.utime(run.supervisor, ns=(2, 2))
    mine.look(run)
    assert mine.is_renewed, "the supervisor itself"
    assert json.loads(run.supervisor.read_text()) == body


_SEEN = st.sampled_from(["renewed", "nothing", "away", "replaced"])
_LOOKS = st.lists(st.tuples(st.floats(0.1, 2 * LAPSED_S), _SEEN), max_size=30)


@given(_LOOKS)
def test_it_lapses_only_where_nobody_renewed_it_for_so_long(looks: list[tuple[float, str]]) -> None:
    """Whatever happens, and however far apart the looks are: the three answers never contradict what was seen."""
    now, version, holder, changed, began = 0.0, 1, "g1", None, 0.0
    watch = LeaseWatch("g1", clock=lambda: now)
    watch.feed(Lease({"generation": holder}, version))
    for pause, what in looks:
        now += pause
        if what == "renewed":
            version, changed = version + 1, changed if holder == "g2" else now
        elif what == "replaced":
            version, holder = version + 1, "g2"
        if what != "away":
            watch.feed(Lease({"generation": holder}, version))
        last = began if changed is None else changed
        assert watch.replaced == (holder == "g2")
        assert watch.is_renewed == (changed is not None and now - changed < LAPSED_S)
        assert watch.has_lapsed == (now - last >= LAPSED_S)
        assert not (watch.is_renewed and watch.has_lapsed)


def test_a_lease_lapses_only_after_several_renewals_were_due() -> None:
    assert LAPSED_S >= 3 * RENEW_S


def test_a_supervisor_that_has_no_agents_yet_renews_nobodys_lease(run: RunDir) -> None:
    """It has only just started, and may die before it starts any: those of the one before are still needed."""
    take(run, "g1")
    watch = LeaseWatch("g1")
    watch.look(run)
    ProcessRecord.of(os.getpid()).write(run.supervisor)
    watch.look(run)
    assert not watch.is_renewed
    assert not watch.replaced
