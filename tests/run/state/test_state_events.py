"""Where a run stands, from its events: only what counts is parsed, and what is damaged is skipped."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from zslurm.aegis.notify import recorder
from zslurm.run.events import AgentLost, AttemptStarted, event_log
from zslurm.run.events.event import from_row
from zslurm.run.run_dir import RunDir
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
    for module in (event_log, state_events):
        monkeypatch.setattr(module, "parse_line", lambda line: parsed.append(line) or parse_line(line))
    found = read_state_events(path)
    assert [event.tag for event in found.events] == ["attempt_started"]
    assert found.newest is not None
    assert found.newest["event"] == "signal"
    assert len(parsed) == 2


@pytest.mark.parametrize("kept", [False, True])
def test_damaged_lines_are_counted_and_the_rest_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kept: bool
) -> None:
    monkeypatch.setattr(state_events, "WORTH_KEEPING", 0 if kept else 1 << 20)
    path = written(tmp_path / "events.jsonl", {"event": "attempt_started", "attempt": 1}, {"event": "signal"})
    with path.open("ab") as file:
        file.write(b'{"time": 3.0, "event": "attempt_ended", "attem\n')  # a crash; the next writer closed the line
        file.write(b"\0" * 40 + b"\n\n")
        file.write(b'{"time": 4.0, "event": "run_ended", "outcome": "fai\x00led"}\n')
    written(path, {"event": "attempt_started", "attempt": 2})
    for _ in range(2):
        found = read_state_events(path)
        assert [event.attempt for event in found.events] == [1, 2]
        assert found.damaged == 3
    with path.open("ab") as file:
        file.write(b'{"time": 5.0, "event": "attem')
    assert read_state_events(path).damaged == 3, "a line that is being written"


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


def test_a_line_is_read_once_and_in_its_place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Wherever a block of the file ends, and also if a line holds another event."""
    root = {"event": "run_ended"}
    events = [{"event": "decision", "action": "stop", "attempt": n, "root": root} for n in range(9)]
    path = written(tmp_path / "events.jsonl", *events)
    for size in (1, 50, 200):
        monkeypatch.setattr(event_log, "_BLOCK", size)
        assert [event.attempt for event in read_state_events(path).events] == list(range(9))


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


LONG = [{"event": "spare_checked", "ok": True, "node": "x" * 200}] * 40
"""Events that change no state, longer than what is read again each time."""


@pytest.fixture
def record(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """Let even a short file be worth a record; return the record of `events.jsonl`."""
    monkeypatch.setattr(state_events, "WORTH_KEEPING", 1000)
    return tmp_path / "state-events.json"


def test_a_long_file_is_read_once(tmp_path: Path, record: Path) -> None:
    path = written(tmp_path / "events.jsonl", {"event": "attempt_started", "attempt": 1}, *LONG)
    first = read_state_events(path)
    assert record.exists()
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
    tmp_path: Path, record: Path, again: tuple[dict[str, Any], ...]
) -> None:
    """A person put another file in the place of the first: a shorter, or a longer one."""
    path = written(tmp_path / "events.jsonl", {"event": "attempt_started", "attempt": 1}, *LONG)
    read_state_events(path)
    assert record.exists()
    path.unlink()
    written(path, *again)
    assert [event.row["attempt"] for event in read_state_events(path).events] == [9] * bool(again)


def test_a_record_of_another_version_is_made_again(tmp_path: Path, record: Path) -> None:
    """A version that knew fewer kinds left rows out."""
    path = written(tmp_path / "events.jsonl", {"event": "attempt_started", "attempt": 1}, *LONG)
    read_state_events(path)
    kept = json.loads(record.read_text())
    record.write_text(json.dumps(kept | {"kinds": kept["kinds"][1:], "rows": []}))
    assert [event.tag for event in read_state_events(path).events] == ["attempt_started"]


@pytest.mark.parametrize(
    "damage",
    [
        "",
        "[]",
        '{"offset": 1}',
        '{"offset": 5, "ends": "00", "rows": [1]}',
        '{"offset": -1, "ends": "", "rows": []}',
    ],
)
def test_a_damaged_record_is_made_again(tmp_path: Path, record: Path, damage: str) -> None:
    path = written(tmp_path / "events.jsonl", {"event": "attempt_started", "attempt": 1}, *LONG)
    read_state_events(path)
    record.write_text(damage)
    assert [event.tag for event in read_state_events(path).events] == ["attempt_started"]
    assert json.loads(record.read_text())["rows"]


def test_without_a_place_for_the_record_everything_is_read(tmp_path: Path, record: Path) -> None:
    (record / "in the way").mkdir(parents=True)
    path = written(tmp_path / "events.jsonl", {"event": "attempt_started", "attempt": 1}, *LONG)
    for _ in range(2):
        assert [event.tag for event in read_state_events(path).events] == ["attempt_started"]


def test_the_supervisor_keeps_the_record(tmp_path: Path, record: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first `status` of a run of some weeks must not read all of its events."""
    monkeypatch.setattr(recorder, "WORTH_KEEPING", 1000)
    with recorder.Recorder(RunDir(tmp_path)) as events:
        events.record(AttemptStarted(attempt=1))
        assert not record.exists()
        for _ in LONG:
            events.record(AgentLost(node="x" * 200))
    kept = json.loads(record.read_text())
    assert [row["event"] for row in kept["rows"]] == ["attempt_started"]
    assert (tmp_path / "events.jsonl").stat().st_size - kept["offset"] <= 2000


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
    recorded = {"attempt_state": {"faults": [FAULT] * 1000}, "resources": {}}
    assert view(decided("restart") | recorded).last_decision == decided("restart") | {"time": 0.0}
    assert view(decided("restart", "observe"), decided("restart", job_id="6")).restarts_in_place == 0


def test_helper_jobs_are_shown_until_they_are_over() -> None:
    queued = {"event": "helper_queued", "helper": "8", "number": 1, "job_id": "7"}
    joined = {"event": "helper_joined", "helper": "8", "nodes": "node3", "job_id": "7"}
    over = {"event": "helper_over", "helper": "8", "reason": "Slurm calls it CANCELLED", "job_id": "7"}
    assert [row["event"] for row in view(queued).helpers] == ["helper_queued"]
    assert [row["event"] for row in view(queued, joined).helpers] == ["helper_joined"]
    assert view(queued, joined, over).helpers == ()
    assert view(queued | {"job_id": "6"}).helpers == (), "of an earlier job"


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
