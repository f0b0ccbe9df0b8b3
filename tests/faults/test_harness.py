"""The harness itself: without a fault it changes nothing, and each fault happens as often as it should."""

from __future__ import annotations

import importlib
import json
import runpy
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.faults.checks import curve
from tests.faults.further import EXITS_0, MOVED_AWAY, PREEMPTED, SAME_NAN
from tests.faults.in_memory import MEMORY_ROWS
from tests.faults.matrix import ROWS
from tests.faults.moments import AT_ONCE
from tests.faults.pair_table import PairEntry, PairTable
from tests.faults.pairs import PAIRS, Expected, Pair
from tests.faults.table import Entry, MemoryEntry, Table
from tests.train.ranks import train_from_server
from tests.train.runs import clean_environment, make_corpus, make_run
from zslurm.train.jsonl import read_jsonl

HOOK = Path(__file__).parent / "in_ranks"
DIVERGES = 6
"""Steps with NaN in a row after which the trainer gives up: one more than optim.skip_limit."""


def train(run: Path, *faults: dict[str, Any]) -> subprocess.CompletedProcess[str]:
    """Train on one rank with a plan of faults."""
    environment = clean_environment() | planned(run, faults)
    command = [sys.executable, "-m", "zslurm.train", str(run)]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300, check=False)


def planned(run: Path, faults: Sequence[dict[str, Any]]) -> dict[str, str]:
    """Variables of ranks with a plan of faults."""
    place = run / "faults"
    place.mkdir(exist_ok=True)
    (place / "plan.json").write_text(json.dumps({"pace_s": 0, "faults": faults}))
    return {"PYTHONPATH": str(HOOK), "ZSLURM_TEST_FAULTS": str(place)}


@pytest.fixture
def run(tmp_path: Path) -> Path:
    return make_run(tmp_path / "run", make_corpus(tmp_path / "tokens.h5"), steps=12)


def test_faults_happen_once_and_leave_the_curve_alone(run: Path, tmp_path: Path) -> None:
    plan = (
        {"what": "raise", "step": 5, "rank": 0},
        {"what": "nan", "step": 5, "times": DIVERGES},
        {"what": "raise", "step": 2, "rank": 1},
    )
    first, second, third = (train_from_server(run, 1, env=planned(run, plan)) for _ in range(3))
    assert (first.returncode, second.returncode, third.returncode) == (1, 1, 0), third.stderr
    assert "mat1 and mat2 shapes cannot be multiplied" in first.stderr
    assert f"it is the last of {DIVERGES} in a row" in second.stderr
    marks = list(read_jsonl(run / "faults" / "marks.jsonl"))
    assert [mark["mark"] for mark in marks if mark["mark"] != "fault"] == [
        "python",
        "imported",
        "loaded",
        "stepped",
    ] * 3
    undisturbed = make_run(tmp_path / "undisturbed", tmp_path / "tokens.h5", steps=12)
    assert train_from_server(undisturbed, 1).returncode == 0
    assert curve(run) == curve(undisturbed)


def test_a_bug_at_import_happens_before_anything_else(run: Path) -> None:
    done = train(run, {"what": "import", "times": 1})
    assert done.returncode == 1
    assert "No module named 'my_attention'" in done.stderr
    assert not (run / "metrics.jsonl").exists()


def test_every_fault_of_the_matrix_has_a_row() -> None:
    assert [row.number for row in ROWS] == [*range(1, 26), 30]
    assert sum(row.sample for row in ROWS) == 1


def test_every_fault_is_in_a_pair() -> None:
    there = {row.number for pair in PAIRS for row in pair.rows}
    alone = {5, 6, 20, 21, 30}  # two nodes at a time or in turn; what is met in pairs as a 4, a 7 or a 19
    assert {row.number for row in (*ROWS, PREEMPTED, EXITS_0, SAME_NAN, MOVED_AWAY)} - there == alone
    assert len({pair.id for pair in PAIRS}) == len(PAIRS)
    assert sum(pair.sample for pair in PAIRS) == 1


def test_a_pair_ends_as_its_worse_half() -> None:
    def expected(first: int, second: int) -> Expected:
        return Expected.of(Pair(ROWS[first - 1], ROWS[second - 1], AT_ONCE))

    killed_and_dead = expected(1, 4)
    assert (killed_and_dead.ends, killed_and_dead.starts, killed_and_dead.requeues) == ("completed", 3, 0)
    assert killed_and_dead.actions == {"restart", "swap"}
    assert (killed_and_dead.excludes, killed_and_dead.leaves) == ((False, True), (True, True))
    assert "node_dead" in killed_and_dead.kinds
    assert "rank_killed" not in killed_and_dead.kinds
    bug_and_dead = expected(19, 4)
    assert (bug_and_dead.ends, bug_and_dead.cause) == ("stopped", ROWS[18].cause)
    assert not expected(1, 21).same_size
    assert expected(6, 13).intervals == 2
    batch_host_and_killed = expected(18, 1)
    assert (batch_host_and_killed.requeues, batch_host_and_killed.standby) == (1, True)
    assert (expected(1, 23).supervisors_killed, expected(1, 4).supervisors_killed) == (1, 0)


def _entry(pair: str, **fields: Any) -> PairEntry:
    entry = PairEntry(
        id=pair, first="node dies", second="supervisor killed", when="noticed", met="node_dead",
        actions=("swap",), ended="completed", attempts=2, requeues=0, excluded=1, wrongly_excluded=0,
        lost_steps=(6,), trains_again_s=14.26, date="2026-01-01", commit="1234567",
    )  # fmt: skip
    return replace(entry, **fields)


def test_a_run_of_some_pairs_keeps_what_others_came_to(tmp_path: Path) -> None:
    """Rows are replaced pair by pair; a pair that failed now has none, nor has one that is no longer there."""
    ids = [pair.id for pair in PAIRS]
    before = PairTable(tmp_path)
    for pair in (ids[2], ids[0], ids[1], "99+99-never"):
        before.passed(_entry(pair, date="2026-01-01"))
    before.write()
    after = PairTable(tmp_path)
    after.passed(_entry(ids[1], date="2026-02-02", wrongly_excluded=1))
    after.failed(ids[2])
    after.write()
    body = json.loads((tmp_path / "fault_pairs.json").read_text())
    assert [(row["id"], row["date"]) for row in body["rows"]] == [(ids[0], "2026-01-01"), (ids[1], "2026-02-02")]
    assert (body["pairs"], body["passed"], body["wrong_exclusions"]) == (len(PAIRS), 2, 1)
    assert (tmp_path / "fault_pairs.md").read_text().count("\n") == 2 + 2


def test_every_fault_of_the_matrix_has_a_rung_of_the_ladder() -> None:
    numbers = [row.number for row in MEMORY_ROWS]
    assert numbers[: len(ROWS)] == [row.number for row in ROWS]
    assert len(set(numbers)) == len(numbers)
    assert sum(row.sample for row in MEMORY_ROWS) == 1
    assert all(row.recovered or row.actions or row.kinds for row in MEMORY_ROWS if row.number > len(ROWS))


def test_a_run_of_some_faults_keeps_what_others_came_to(tmp_path: Path) -> None:
    restart, memory = (row for row in ROWS[:2]), MEMORY_ROWS[1]
    before = Table(tmp_path)
    for row in restart:
        before.passed(Entry(row.number, row.fault, None, None, (), "completed", (), (), (), {}))
    before.passed(MemoryEntry(2, memory.fault, None, None, (), (), "", "completed", (), (), None))
    before.write()
    after = Table(tmp_path)
    after.failed(ROWS[0])
    after.failed(ROWS[2])
    after.passed(Entry(3, ROWS[2].fault, None, None, (), "completed", (), ("node1",), (), {}))
    after.write()
    body = json.loads((tmp_path / "faults.json").read_text())
    assert [row["number"] for row in body["rows"]] == [2, 3]
    assert [row["number"] for row in body["in_memory"]] == [2]
    assert (body["passed"], body["wrong_exclusions"]) == (3, 1)
    assert all(row["date"] and row["commit"] for row in body["rows"])
    text = (tmp_path / "faults.md").read_text()
    assert "aegis.recovery: memory" in text
    assert f"| {body['rows'][0]['date']}, {body['rows'][0]['commit']} |" in text


def test_the_methods_in_which_ranks_are_killed_are_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("ZSLURM_TEST_FAULTS", raising=False)
    hook = runpy.run_path(str(HOOK / "sitecustomize.py"))
    for module, name, method in hook["_KILLS"].values():
        assert callable(getattr(getattr(importlib.import_module(module), name), method))
