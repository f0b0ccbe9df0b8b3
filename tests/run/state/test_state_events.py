"""Where a run stands, from its events: only what counts is parsed, and what is damaged is skipped."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from zslurm.run.events.event import from_row
from zslurm.run.state import state_events
from zslurm.run.state.state_events import aegis_view, read_state_events
from zslurm.train.jsonl import JsonLinesWriter, parse_line, read_jsonl

FAILED = {"outcome": "failed", "exit_code": 1}
FAULT = {"kind": "rank_killed", "role": "root", "scope": "unknown", "line": "Killed", "node": "node1", "rank": 3}


def written(path: Path, *events: dict[str, Any]) -> Path:
    with JsonLinesWriter(path) as lines:
        for number, event in enumerate(events):
            lines.append({"time": float(number), "job_id": "7", **event})
    return path


def test_lines_about_faults_are_not_parsed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    noise = [{"event": "fault_detected", "attempt": 1, "line": '"event":"run_ended"', **FAULT}] * 100
    path = written(
        tmp_path / "events.jsonl", {"event": "attempt_started", "attempt": 1}, *noise, {"event": "signal"}
    )
    parsed: list[bytes] = []
    monkeypatch.setattr(state_events, "parse_line", lambda line: parsed.append(line) or parse_line(line))
    found = read_state_events(path)
    assert [event.tag for event in found.events] == ["attempt_started"]
    assert found.newest is not None
    assert found.newest["event"] == "signal"
    assert len(parsed) == 2


@pytest.mark.parametrize("advisories", [1, 20])
def test_an_advisory_fault_is_not_the_last_event(tmp_path: Path, advisories: int) -> None:
    """A healthy run has many of them, and its last event read "fault detected"."""
    noted = [{"event": "fault_detected", "kind": "clock_drift", "role": "advisory", "line": "0.1 s"}] * advisories
    path = written(tmp_path / "events.jsonl", {"event": "attempt_started", "attempt": 1}, *noted)
    newest = read_state_events(path).newest
    assert newest is not None
    assert newest["event"] == "attempt_started"


def test_lines_of_another_writer_count_too(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    long_first = {"why": "x" * 300, "event": "run_ended"}
    path.write_text(f"{json.dumps({'time': 1.0, 'event': 'run_ended'})}\n{json.dumps(long_first)}\n")
    assert [event.row for event in read_state_events(path).events] == list(read_jsonl(path))


@pytest.mark.parametrize(
    "damage", [b"", b'{"time":9,"event":"run_en', b"\x00" * 50 + b"\n", b"[]\n", b'{"a":1}\n']
)
def test_damaged_lines_hide_nothing(tmp_path: Path, damage: bytes) -> None:
    path = written(tmp_path / "events.jsonl", {"event": "attempt_started"}, {"event": "attempt_ended"})
    with path.open("ab") as file:
        file.write(damage)
    found = read_state_events(path)
    assert [event.tag for event in found.events] == ["attempt_started", "attempt_ended"]
    assert found.newest is not None


LONG = [{"event": "spare_warmed", "node": "x" * 200}] * 40
"""Events that change no state, longer than what is read again each time."""


@pytest.fixture
def keeps_records(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """Let even a short file be worth a record in the user's state directory, which is returned."""
    monkeypatch.setattr(state_events, "_WORTH_KEEPING", 1000)
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    return tmp_path / "state" / "zslurm" / "events"


def test_a_long_file_is_read_once(tmp_path: Path, keeps_records: Path) -> None:
    path = written(tmp_path / "events.jsonl", {"event": "attempt_started", "attempt": 1}, *LONG)
    first = read_state_events(path)
    assert len(list(keeps_records.iterdir())) == 1
    text = path.read_bytes()
    path.write_bytes(text[:200] + b"~" * 1000 + text[1200:])  # what was read before is not looked at again
    written(path, {"event": "run_ended", **FAILED})
    second = read_state_events(path)
    assert [event.row for event in second.events][:1] == [event.row for event in first.events]
    assert [event.tag for event in second.events] == ["attempt_started", "run_ended"]
    assert second.newest is not None
    assert second.newest["event"] == "run_ended"


@pytest.mark.parametrize("again", [(), ({"event": "attempt_started", "attempt": 9}, *LONG, *LONG)])
def test_a_record_of_another_file_is_not_used(
    tmp_path: Path, keeps_records: Path, again: tuple[dict[str, Any], ...]
) -> None:
    """A run was removed and submitted again under its name: its file is shorter, or longer, than the first."""
    path = written(tmp_path / "events.jsonl", {"event": "attempt_started", "attempt": 1}, *LONG)
    read_state_events(path)
    path.unlink()
    written(path, *again)
    assert [event.row["attempt"] for event in read_state_events(path).events] == [9] * bool(again)


def test_a_record_of_another_version_is_made_again_and_is_private(tmp_path: Path, keeps_records: Path) -> None:
    """A version that knew fewer kinds left rows out; causes and paths are for their owner alone."""
    path = written(tmp_path / "events.jsonl", {"event": "attempt_started", "attempt": 1}, *LONG)
    read_state_events(path)
    (record,) = keeps_records.iterdir()
    assert record.stat().st_mode & 0o077 == 0
    kept = json.loads(record.read_text())
    record.write_text(json.dumps(kept | {"kinds": kept["kinds"][1:], "rows": []}))
    assert [event.tag for event in read_state_events(path).events] == ["attempt_started"]


@pytest.mark.parametrize("damage", ["", "[]", '{"offset": 1}', '{"offset": 5, "ends": "00", "rows": [1]}'])
def test_a_damaged_record_is_made_again(tmp_path: Path, keeps_records: Path, damage: str) -> None:
    path = written(tmp_path / "events.jsonl", {"event": "attempt_started", "attempt": 1}, *LONG)
    read_state_events(path)
    (record,) = keeps_records.iterdir()
    record.write_text(damage)
    assert [event.tag for event in read_state_events(path).events] == ["attempt_started"]
    assert json.loads(record.read_text())["rows"]


def test_records_that_nobody_writes_any_more_are_removed(
    tmp_path: Path, keeps_records: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    read_state_events(written(tmp_path / "old.jsonl", *LONG))
    (old,) = keeps_records.iterdir()
    os.utime(old, (0, 0))
    read_state_events(written(tmp_path / "new.jsonl", *LONG))
    assert old not in list(keeps_records.iterdir())


def test_without_a_place_for_records_everything_is_read(tmp_path: Path, keeps_records: Path) -> None:
    (tmp_path / "state").write_text("a file, so that no directory can be made")
    path = written(tmp_path / "events.jsonl", {"event": "attempt_started", "attempt": 1}, *LONG)
    for _ in range(2):
        assert [event.tag for event in read_state_events(path).events] == ["attempt_started"]


def test_no_file_has_no_events(tmp_path: Path) -> None:
    assert read_state_events(tmp_path / "events.jsonl") == state_events.StateEvents()


def view(*events: dict[str, Any], now: float = 100.0) -> state_events.AegisView:
    rows = [{"job_id": "7", "time": float(i), **event} for i, event in enumerate(events)]
    return aegis_view([from_row(row) for row in rows], "7", now)


def test_what_the_decision_blames_wins_over_the_end_of_the_attempt() -> None:
    end = {
        "event": "attempt_ended",
        "attempt": 2,
        "cause": {"message": "connection closed by peer", "rank": 0},
    } | FAILED
    decision = {"event": "decision", "attempt": 2, "action": "restart", "root": FAULT, "mode": "act"}
    again = {"event": "run_ended", "cause": {"message": "Killed", "rank": 3}} | FAILED
    assert (view(end).last_cause or {})["message"] == "connection closed by peer"
    cause = view(end, decision, again).last_cause
    assert cause == {
        "message": "Killed", "kind": "rank_killed", "rank": 3, "node": "node1", "attempt": 2, "time": 1.0,
    }  # fmt: skip


def test_only_what_was_done_in_this_job_is_a_restart_in_place() -> None:
    def decided(action: str, mode: str = "act", job_id: str = "7") -> dict[str, Any]:
        return {"event": "decision", "action": action, "mode": mode, "job_id": job_id}

    told = [decided("restart"), decided("swap"), decided("shrink"), decided("requeue"), decided("stop")]
    assert view(*told).restarts_in_place == 3
    recorded = {"attempt_state": {"faults": [FAULT] * 1000}, "situation": {}, "resources": {}}
    assert view(decided("restart") | recorded).last_decision == decided("restart") | {"time": 0.0}
    assert view(decided("restart", "observe"), decided("restart", job_id="6")).restarts_in_place == 0


def test_recoveries_in_memory_of_this_job_are_counted() -> None:
    once = {"event": "recovered_in_memory", "attempt": 1, "generation": 1, "ranks": [1], "step": 63, "job_id": "7"}
    assert view(once, once, once | {"job_id": "6"}).recovered_in_memory == 2


def test_excluded_are_nodes_whose_exclusion_still_holds() -> None:
    def excluded(nodes: object, **fields: Any) -> dict[str, Any]:
        return {"event": "nodes_excluded", "nodes": nodes, **fields}

    assert view(excluded("node[1-2]", expires=101.0), excluded(["node5"], expires=99.0)).excluded == (
        "node1",
        "node2",
    )
    assert view(excluded("node1"), excluded("node2", job_id="6")).excluded == ("node1", "node2"), "without an end"
    failed = {"event": "exclusion_failed", "nodes": "node1", "reason": "no"}
    assert view(excluded("node1", expires=101.0), failed).excluded == ("node1",), "the policy avoids it"
    assert view(excluded("node1", expires=101.0), excluded("node1", expires=99.0)).excluded == (), "the newest"
    assert view(excluded("node[", expires=101.0), excluded(None), excluded(7)).excluded == (), "damaged"


REPLACED = {"generation": 1, "ranks": [0], "step": 3, "rolled_back": 0}


@pytest.mark.parametrize(
    ("later", "waits"),
    [
        ({"event": "spare_checked", "node": "node1", "ok": True}, True),
        ({"event": "attempt_ended", "attempt": 1, **FAILED}, True),
        ({"event": "attempt_started", "attempt": 1, "nodes": "node1", "world_size": 1}, False),
        ({"event": "supervisor_started", "host": "node1"}, False),
        ({"event": "recovered_in_memory", "attempt": 1, **REPLACED}, False),
        ({"event": "run_ended", **FAILED}, False),
    ],
)
def test_a_start_is_postponed_until_ranks_or_another_supervisor_start(
    tmp_path: Path, later: dict[str, Any], waits: bool
) -> None:
    path = written(tmp_path / "events.jsonl", {"event": "start_postponed", "reason": "no space"}, later)
    events = read_state_events(path).events
    assert (aegis_view(events, "7").postponed is not None) == waits
    assert aegis_view(events, "8").postponed is None
